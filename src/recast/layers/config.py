"""What becomes attention, how and when, as plain data: convolutions, the pooling, and their schedule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from recast.errors import RecastError, shown
from recast.fields import Checked, Count, CountOrZero, Finite, Positive, Ratio, Width

Gate = Literal["linear", "sigmoid", "bias"]
Backend = Literal["auto", "reference", "dense", "split", "merged"]
Content = Literal["softmax", "linear"]
StrideMode = Literal["keep", "remove", "dilate"]
QueryKey = Literal["zero", "random", "similar", "images"]
PoolKind = Literal["none", "single", "per_class"]
PoolStart = Literal["average", "paper"]
Order = Literal["last_first", "first_first", "learned"]

AUTO: dict[Gate, tuple[str, str, bool]] = {
    "linear": ("none", "middle", False), "sigmoid": ("all", "all", True), "bias": ("all", "all", True),
}  # fmt: skip
"""Of each gate: heads with a Gaussian, heads with a content map, and if there is W_val, where it is not said."""

PAPERS_LAYER: dict[str, Any] = {"content_heads": "all", "gaussian_heads": "all", "project_values": True}
"""Content, a Gaussian and W_val in every head, whatever the gate: the layer of the papers."""


@dataclass(frozen=True)
class RecastConfig(Checked):
    """How a convolution becomes gated positional self-attention (GPSA).

    Example:
        >>> config = recast.RecastConfig(gate="sigmoid", content_heads=(0, 4, 8))
        >>> config.content_heads
        '0,4,8'
    """

    gate: Gate = "linear"
    """linear: starts as exactly the convolution. sigmoid: the gate of the T-CNN paper (Eq. 7). bias: no gate, position
    is a learned bias in the content's own softmax (C-MHSA, PRS)."""
    alpha: Positive = 1.0
    """Locality strength α > 0 of the Gaussian heads at the start; 1/α is the attention span."""
    lambda_init: Finite = 1.0
    """Sigmoid gate only: λ at the start; σ(λ) is the share of positional attention."""
    gamma_init: Finite = 0.0
    """Linear gate only: share γ of content attention at the start; 0 is exact."""
    s_init: Finite = 0.0
    """Linear gate only: spread s (one-hot shift to Gaussian) at the start; 0 is exact."""
    bias_init: Positive = 20.0
    """bias only: relative bias M of a head's tap at the start; other pixels have 0, so e^-M of its weight. 20: exact to
    7e-7, but its attention hardly learns. 10 to 15 is for training."""
    gate_range: tuple[float, float] | None = None
    """Linear gate only: clamp γ and s, e.g. (0, 1) keeps every map a convex mix. None: free reals."""
    content_heads: str = "auto"
    """Heads that have a content map: all (the papers), middle, a number (spread evenly, the middle one among them), or
    positions of the kernel, row by row from 0, such as 0,4,8. The others cost nothing. auto: middle with the linear
    gate, else all."""
    gaussian_heads: str = "auto"
    """Heads that have a Gaussian map, as content_heads; or none. auto: none with the linear gate; the others need
    all."""
    head_dim: Width | None = None
    """Width D_h of a head's queries and keys. None: max(1, C_in // heads), with fewer content heads min(C_in, 32) //
    content heads if that is more; about 8 in grouped and depthwise layers."""
    project_values: bool | None = None
    """W_val, which all heads share: the papers', the identity at the start. Off: pixels are the values, and W_out alone
    is trained; the same functions for C² multiply-adds a pixel less. None: off with the linear gate, else on."""
    query_key: QueryKey = "zero"
    """Queries and keys at the start; with closed gates all are exact. zero: W_key = 0, uniform content maps. random:
    both random (ConViT). similar: W_qry = W_key with random orthonormal rows, pixels look at pixels like themselves.
    images: the same on the principal components of what the layer sees, from training images (`recast.wake_`)."""
    logit_std: Positive = 1.5
    """similar and images: standard deviation of a query's logits over its keys at the start."""
    content: Content = "softmax"
    """softmax: the paper's. linear: cost linear in the tokens, for early stages (efficient attention, rank D_h)."""
    keep_parametrization: bool = False
    """Keep what makes the kernel (weight standardisation, weight or spectral norm) over W_out. Off: take its result."""
    stride: StrideMode = "keep"
    """keep: exact. remove: the paper's stride 1. dilate: as remove, with the layers after it dilated to match."""
    attend_padding: bool = False
    """Let content attention see the padding tokens (the paper's literal reading)."""
    backend: Backend = "auto"
    """Which code computes the layer: they agree to rounding."""

    def __post_init__(self) -> None:
        for name in ("content_heads", "gaussian_heads"):
            object.__setattr__(self, name, head_choice(getattr(self, name), name))
        super().__post_init__()
        if self.content_heads == "none":
            raise RecastError("content_heads must keep at least one head, got none")
        if self.gate != "linear" and self.gaussian_heads not in ("auto", "all"):
            raise RecastError(f"gaussian_heads={self.gaussian_heads} requires gate='linear', got gate={self.gate!r}")
        if self.gate == "sigmoid" and (self.gamma_init, self.s_init, self.gate_range) != (0.0, 0.0, None):
            raise RecastError(
                "gamma_init, s_init and gate_range require gate='linear'; use lambda_init with gate='sigmoid'"
            )
        if self.gate == "bias":
            self._check_bias()
        elif self.bias_init != 20.0:
            raise RecastError(f"bias_init requires gate='bias', got gate={self.gate!r}")
        if self.gate == "linear" and self.lambda_init != 1.0:
            raise RecastError("lambda_init requires gate='sigmoid'; use gamma_init and s_init with gate='linear'")
        if self.gate_range is not None:
            low, high = self.gate_range
            if not low < high:
                raise RecastError(f"gate_range must be (low, high) with low < high, got {self.gate_range}")
            if not (low <= self.gamma_init <= high and low <= self.s_init <= high):
                raise RecastError(
                    f"gamma_init={self.gamma_init} and s_init={self.s_init} must lie in gate_range {self.gate_range}"
                )

    def maps(self) -> tuple[str, str, bool]:
        """Return the choices of heads with a Gaussian and with a content map, and if there is W_val, auto resolved."""
        gaussian, content, values = AUTO[self.gate]
        return (
            gaussian if self.gaussian_heads == "auto" else self.gaussian_heads,
            content if self.content_heads == "auto" else self.content_heads,
            values if self.project_values is None else self.project_values,
        )

    def _check_bias(self) -> None:
        """Raise `RecastError` for settings that C-MHSA does not have: its maps are one softmax of content and bias."""
        plain = RecastConfig()
        others = (
            "alpha",
            "lambda_init",
            "gamma_init",
            "s_init",
            "gate_range",
            "content",
            "attend_padding",
            "backend",
        )
        wrong = [name for name in others if getattr(self, name) != getattr(plain, name)]
        if wrong := wrong + ["content_heads"] * (self.content_heads not in ("auto", "all")):
            raise RecastError(
                f"gate='bias' does not support {wrong[0]}={getattr(self, wrong[0])!r}: its options are bias_init and "
                "head_dim"
            )


def head_choice(choice: object, name: str) -> str:
    """Return the canonical text of a choice of heads: a word, a number, or positions such as "0,4,8".

    choice: that text, a whole number, or a sequence of positions. Raises RecastError for anything else.
    """
    text = ",".join(map(str, choice)) if isinstance(choice, list | tuple) else str(choice)
    parts = [part.strip() for part in text.removesuffix(",").split(",")]  # a single position is written "4,"
    if len(parts) == 1 and (
        text in ("auto", "all", "middle", "none") or (isinstance(choice, int | str) and text.isdecimal())
    ):
        return "none" if text.isdecimal() and int(text) == 0 else text
    if not all(part.isdecimal() and len(part) < 6 for part in parts) or len(set(map(int, parts))) < len(parts):
        raise RecastError(
            f"{name} must be all, middle, none, a number of heads, or different positions of the kernel such as "
            f"0,4,8, got {shown(choice)}"
        )
    return ",".join(str(number) for number in sorted(map(int, parts))) + "," * (len(parts) == 1)


@dataclass(frozen=True)
class PoolConfig(Checked, prefix="pool."):
    """How a network's average pooling becomes attention pooling (Touvron et al. 2021, arXiv:2112.13692).

    Example:
        >>> recast.PoolConfig("per_class", num_heads=2).is_on
        True
    """

    kind: PoolKind = "none"
    """none: the network's own pooling. single: one learned token looks at the pixels. per_class: a token for every
    class."""
    start: PoolStart = "average"
    """average: starts as exactly the mean over the pixels. paper: the paper's, from which training starts anew."""
    cls_in_keys: bool | None = None
    """Whether the token is among its own keys. None: as in the paper, yes for a single token and no for one a class;
    no with start=average."""
    num_heads: Width = 1
    """Attention heads; the paper takes one."""
    mlp_ratio: Ratio = 3.0
    """Hidden width of the pooling's MLP, in widths of the map."""
    init_values: Finite | None = None
    """LayerScale γ of the pooling at the start. None: 0 for average (exact), 1e-4 for paper."""
    allow_change: bool = False
    """Take start=average in a network that does not average over its last map (class token, maximum, SqueezeNet),
    although its logits change. False: refuse."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.start == "average" and self.cls_in_keys:
            raise RecastError(
                "pool.start=average does not allow pool.cls_in_keys, which moves the average by 1/(n+1): drop "
                "cls_in_keys, or use pool.start=paper"
            )

    @property
    def is_on(self) -> bool:
        """True if the network's own pooling is replaced."""
        return self.kind != "none"


@dataclass
class ScheduleConfig(Checked, prefix="schedule."):
    """When convolutions become attention: before training, or during it with the same optimiser."""

    name: Literal["before", "never", "at_once", "progressive", "listed", "learned"] = "before"
    """before: before training (T-CNN). never: the layers stay convolutions, only recast.stride acts on them (a control
    whose maps are as large as the hybrid's). at_once: all layers after conv_epochs epochs (T-CNN*). progressive: one
    layer after the other at equal distances, all through training (PRS). listed: on given dates. learned: when the
    gates promise more than the convolutions gain."""
    conv_epochs: CountOrZero = 0
    """at_once: epochs trained as convolutions; 0: attention from the start, with the whole learning-rate schedule."""
    order: Order = "last_first"
    """progressive: which layer is the first to become attention; PRS begins with the last. learned: at every date the
    one whose gates promise most."""
    dates: list[str] = field(default_factory=list)
    """listed: EPOCH:LAYER words, e.g. 58:blocks.5.* 115:blocks.4.*; the layers are attention from that epoch on,
    counted from 1."""
    probe_images: Count = 256
    """learned: training images that the gradients of a linear gate are measured on, whatever the layers' own gate."""

    @property
    def is_during(self) -> bool:
        """True if layers become attention while the network trains."""
        return self.name not in ("before", "never")


def parse_dates(words: Sequence[str]) -> dict[int, list[str]]:
    """Return epoch → names for `["58:blocks.5.*", "115:blocks.4.*"]`. Raises RecastError for other words."""
    dates: dict[int, list[str]] = {}
    for word in words:
        epoch, colon, layer = word.partition(":")
        if not (colon and layer and epoch.strip().isdecimal() and len(epoch) < 10):
            raise RecastError(f"schedule.dates must be EPOCH:LAYER, such as 58:blocks.5.*, got {shown(word)}")
        dates.setdefault(int(epoch), []).append(layer.strip())
    if not dates:
        raise RecastError("schedule=listed requires schedule.dates: EPOCH:LAYER for every layer, such as 58:blocks.5.*")
    return dates
