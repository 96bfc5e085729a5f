"""Parts of a plan: steps, convolutions that stay, and the place of pooling."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from recast.layers.geometry import Geometry
from recast.tracing.cost import Cost

Layout = Literal["NCHW", "NHWC", "NLC", "flat"]


@dataclass(frozen=True)
class Fold:
    """The form that folding gave a layer: a replay restores it before it loads the weights."""

    convolution: bool
    """It is a convolution: the parent's own, or the one that its closed heads are."""
    kernel: tuple[int, int]
    gaussian_heads: tuple[int, ...]
    """Heads that keep a Gaussian map."""
    content_heads: tuple[int, ...]
    """Heads that keep a content map."""
    value: bool
    """W_val is still there (it was not multiplied into W_out)."""
    batch_norm: str = ""
    """The BatchNorm that was multiplied in."""


@dataclass(frozen=True)
class Folded:
    """Report of `fold_` for a layer: its heads, the closed ones, and its new form."""

    name: str
    closed: int
    heads: int
    convolution: bool
    change: float
    """Largest dropped gate, max(|γ|, |s|) of the maps that were removed: 0 where the fold is exact."""
    gaussian: int = 0
    """Heads that keep a Gaussian map."""
    content: int = 0
    """Heads that keep a content map."""
    kernel: tuple[int, int] = (0, 0)
    output_error: float | None = None
    """Relative change of the model's outputs on the data, by this layer and those before it."""
    batch_norm: str = ""
    """The BatchNorm that was multiplied in."""


@dataclass(frozen=True)
class Step:
    """One convolution that becomes attention, or gets it beside it; or attention after a sequence of blocks.

    Sizes are (channels, rows, columns) at the example; costs are per image.
    """

    name: str
    rule: str
    parent_geometry: Geometry
    geometry: Geometry
    groups: int
    input: tuple[int, int, int]
    output: tuple[int, int, int]
    before: Cost
    after: Cost
    exact: bool
    calls: int = 1
    beside: bool = False
    """Attention is beside the convolution, which stays as it is."""
    fold: Fold | None = None
    """What `fold_` made of the layer."""

    @property
    def is_after_block(self) -> bool:
        """Attention is beside no convolution: it follows a sequence of blocks (`surgery.places`)."""
        return self.rule == "PassThrough"

    @property
    def heads(self) -> int:
        """Heads of the layer: one beside a convolution, else one for each tap."""
        return 1 if self.beside else self.geometry.num_heads

    @property
    def queries(self) -> int:
        """Output pixels."""
        return self.output[1] * self.output[2]

    @property
    def keys(self) -> int:
        """Tokens: pixels of the input, explicitly padded unless attention is beside the convolution."""
        rows, columns = self.input[1:] if self.beside else self.geometry.padded_size(*self.input[1:])
        return rows * columns

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON-able fields, those of the geometry among them, with heads, queries and keys."""
        plain = asdict(self)
        shown = {"heads": self.heads, "queries": self.queries, "keys": self.keys}
        return plain | plain.pop("geometry") | shown


@dataclass(frozen=True)
class Left:
    """A convolution that stays as it is, and why."""

    name: str
    reason: str


@dataclass(frozen=True)
class Place:
    """Place of attention pooling, from `find_place`."""

    how: Literal["module", "append", "head"]
    """module: it replaces the pooling module `name`. append: it follows the last layer of the nn.Sequential `name`, and
    the code that pools after it sees one position. head: before the network's `forward_head`."""
    name: str
    dim: int
    """Channels of what is pooled."""
    takes: Layout
    gives: Layout
    prefix_tokens: int = 0
    """Tokens before those of the patches."""
    classifier: str | None = None
    """The linear layer (or 1×1 convolution) that gives the logits; None where there is no single one."""
    averages: bool = True
    """The network pools by the mean over all positions, with nothing in between: the average start is exact."""
    relu: bool = False
    """append: the code applies a ReLU before it averages, so the pooling gets one too."""
