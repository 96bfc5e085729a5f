"""How a convolution becomes attention, as plain data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from annotated_types import Ge, Le
from pydantic import BeforeValidator, Field, model_validator

from recast.config import Finite, OneOf, Positive, Rare, Width, clash, problem

Backend = Literal["auto", "reference", "dense", "split", "merged", "sdpa"]
QueryKey = Literal["zero", "random", "similar", "images"]

Position = Annotated[int, Ge(0), Le(2**14)]
"""A head: its place in the kernel, row by row from 0."""


def _heads(value: Any) -> Any:
    """Read a choice of heads as YAML, JSON, Python or words of a command line give it."""
    words = value.split(",") if isinstance(value, str) else value
    if isinstance(words, list | tuple):
        parts = [word.strip() if isinstance(word, str) else word for word in words]
        value = parts[0] if len(parts) == 1 and isinstance(parts[0], str) else [part for part in parts if part != ""]
        if isinstance(value, list) and all(str(part).isdecimal() for part in value):
            positions = sorted(int(part) for part in value)
            if len(set(positions)) == len(positions) > 0:
                return tuple(positions)
    if value in ("all", "none") or str(value).isdecimal():
        return int(value) if str(value).isdecimal() else value
    raise problem("must be all, a number of heads > 0, or different positions of the kernel such as 0,4,8")


ContentHeads = Annotated[
    Literal["all"] | Width | tuple[Position, ...],
    BeforeValidator(_heads),
    Field(
        description="Heads with a content map: all, as in the papers, a number, or positions (0,4,8). A number of "
        "heads is spread evenly and includes the middle one; positions count the kernel's taps row by row from 0. "
        "Other heads cost nothing."
    ),
]
ProjectValues = Annotated[
    bool,
    Rare(),
    Field(
        description="Learn W_val, shared by all heads and initially the identity, as in the papers. Off (default with "
        "the linear gate): the pixels are the values; the same set of functions with C² multiply-adds less per pixel."
    ),
]
StartOfQueries = Annotated[
    QueryKey,
    Field(
        description="Initial queries and keys. With closed gates all are exact. images, the default beside a "
        "convolution: random directions in the principal components of the layer's input on training images, of a size "
        "that makes maps differ from uniform ones (`recast.wake_`); W_qry = W_key in the papers' layers. zero, the "
        "default elsewhere: W_key = 0, uniform content maps. random: both random (ConViT). similar: W_qry = W_key with "
        "random orthonormal rows, so that pixels attend to similar pixels."
    ),
]
GaussianHeads = Annotated[Literal["all", "none"] | Width | tuple[Position, ...], BeforeValidator(_heads)]


PAPERS_LAYER: dict[str, Any] = {"content_heads": "all", "gaussian_heads": "all", "project_values": True}
"""Content, a Gaussian and W_val in every head: the layer of the papers, which gates other than linear always have."""


class RecastConfig(OneOf):
    """Settings of the attention that a convolution gets (gate="beside") or becomes (the papers' gates).

    The gate decides which other fields there are: `BesideGate`, `LinearGate`, `SigmoidGate`, `BiasGate`.

    Example:
        >>> recast.RecastConfig().gate
        'beside'
        >>> recast.RecastConfig(gate="sigmoid", lambda_init=2.0).lambda_init
        2.0
        >>> recast.RecastConfig(gate="linear", content_heads="0,4,8").content_heads
        (0, 4, 8)
    """

    by: ClassVar[str] = "gate"
    default: ClassVar[str] = "beside"
    where: ClassVar[str] = "last_stage"
    """Convolutions that `plan` selects by default."""

    gate: Literal["beside", "linear", "sigmoid", "bias"]
    """Kind of attention. beside: the convolution stays as it is, a head of content attention is added to its output.
    linear: the convolution's taps become heads; starts as exactly the convolution. sigmoid: the same with the gate of
    the T-CNN paper (Eq. 7). bias: no gate, position is a learned bias in the content's own softmax (C-MHSA, PRS)."""
    head_dim: Width | None = None
    """Width D_h of a head's queries and keys. None: min(C_in, 32) beside a convolution or after a block, max(1, C_in //
    heads) in a head of the papers' layers; about 8 in grouped and depthwise layers."""
    query_key: StartOfQueries = "zero"
    logit_std: Annotated[Positive, Rare()] = 1.5
    """With query_key similar or images: initial standard deviation of a query's logits over its keys."""

    if TYPE_CHECKING:

        @property
        def content_heads(self) -> Any: ...
        @property
        def stride(self) -> Any: ...
        @property
        def project_values(self) -> bool: ...

        def __init__(self, *values: Any, **named: Any) -> None: ...


class BesideGate(RecastConfig):
    """Content attention beside a convolution that stays as it is, y = conv(X) + γ ⊙ (C X W_con), or after a block."""

    where: ClassVar[str] = "last_of_blocks"
    stride: ClassVar[Literal["keep"]] = "keep"
    gate: Literal["beside"] = "beside"
    beside: Literal["convolution", "block"] = "convolution"
    """What attention stands beside. convolution: each that is selected; it reads the convolution's input. block: none;
    it follows the sequence of blocks that the selected convolutions of a stage are in, and reads its output."""
    query_key: StartOfQueries = "images"
    gamma_init: Finite = 0.0
    """Initial factor γ of content attention, of every channel. 0 is exact."""


class PapersGate(RecastConfig):
    """Gates of layers that replace the convolution, one head for each tap of its kernel."""

    project_values: ProjectValues = True
    stride: Literal["keep", "remove"] = "keep"
    """Stride of a recast layer. keep: exact. remove: the paper's stride 1."""

    @model_validator(mode="before")
    @classmethod
    def _without_choices_of_the_gate(cls, values: Any) -> Any:
        """Drop `PAPERS_LAYER`'s choices where the gate makes them itself."""
        if not isinstance(values, dict):
            return values
        fields, made = cls.model_fields, PAPERS_LAYER
        return {name: v for name, v in values.items() if name in fields or name not in made or v != made[name]}


class GaussianGate(PapersGate):
    """Gates that mix content attention with a map of the position."""

    alpha: Positive = 1.0
    """Initial locality α > 0 of the Gaussian heads. 1/α is the attention span."""
    content_heads: ContentHeads = "all"
    content: Annotated[Literal["softmax", "linear"], Rare()] = "softmax"
    """Content attention. softmax: the paper's. linear: cost linear in the tokens, for large maps (efficient attention).
    """
    attend_padding: Annotated[bool, Rare()] = False
    """Let content attention see the padding, as the paper's equation says literally."""
    backend: Annotated[Backend, Rare()] = "auto"
    """Implementation of the layer. All agree up to rounding."""


class LinearGate(GaussianGate):
    """Start as exactly the convolution."""

    gate: Literal["linear"] = "linear"
    project_values: ProjectValues = False
    gamma_init: Finite = 0.0
    """Initial share γ of content attention. 0 is exact."""
    s_init: Annotated[Finite, Rare()] = 0.0
    """Initial share s of the Gaussian in the positional map; 0 (a one-hot shift) is exact."""
    gaussian_heads: Annotated[GaussianHeads, Rare()] = "none"
    """Heads with a Gaussian map: none, or as for content_heads."""

    @model_validator(mode="after")
    def _starts_as_it_says(self) -> Self:
        if self.s_init and self.gaussian_heads == "none":
            raise clash("`s_init` requires `gaussian_heads`: without a Gaussian there is nothing to spread")
        return self


class SigmoidGate(GaussianGate):
    """The gate of T-CNN (Eq. 7)."""

    gaussian_heads: ClassVar[Literal["all"]] = "all"
    gate: Literal["sigmoid"] = "sigmoid"
    lambda_init: Finite = 1.0
    """Initial λ. σ(λ) is the share of positional attention."""


class BiasGate(PapersGate):
    """C-MHSA (PRS): one softmax of content and a learned bias of position."""

    content_heads: ClassVar[Literal["all"]] = "all"
    gate: Literal["bias"] = "bias"
    bias_init: Positive = 20.0
    """Initial relative bias M of a head's tap. Other pixels have bias 0 and thus e^-M of its weight. 20: exact to 7e-7,
    but attention hardly learns. Use 10 to 15 for training."""
