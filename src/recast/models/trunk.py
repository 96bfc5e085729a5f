"""What networks share whose blocks all work on maps of one size, in the words that timm has for it."""

from __future__ import annotations

from timm.models import checkpoint_seq
from timm.models._features import feature_take_indices  # of no public module
from torch import Tensor, nn

from recast.errors import RecastError


class Trunk(nn.Module):
    """A stem and a sequence of blocks. A subclass makes `blocks` and `grad_checkpointing`, and says what its stem is
    and, where it has one, its last norm."""

    blocks: nn.Sequential
    grad_checkpointing: bool

    def embed(self, x: Tensor) -> Tensor:
        """Images to the first block's map."""
        raise NotImplementedError

    def normed(self, x: Tensor) -> Tensor:
        """A block's map through the last norm; as it is where there is none."""
        return x

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute each block in the backward pass instead of keeping what it computed."""
        self.grad_checkpointing = enable

    def forward_features(self, x: Tensor) -> Tensor:
        """B×in_chans×H×W images to the last block's map, B×d×H/P×W/P with P the stem's stride, normalised."""
        x = self.embed(x)
        return self.normed(checkpoint_seq(self.blocks, x) if self.grad_checkpointing else self.blocks(x))

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | list[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> list[Tensor] | tuple[Tensor, list[Tensor]]:
        """The maps after blocks: the last `indices` (all if None), or those listed; `norm`: through the last norm,
        where there is one.

        `intermediates_only`: the list alone, else the final map and the list. `stop_early`: later blocks are not run.
        """
        if output_fmt != "NCHW":
            raise RecastError(f"a {type(self).__name__}'s maps are NCHW, got output_fmt={output_fmt!r}")
        taken, last = feature_take_indices(len(self.blocks), indices)
        maps = []
        x = self.embed(x)
        for i, block in enumerate(self.blocks[: last + 1] if stop_early else self.blocks):
            x = checkpoint_seq([block], x) if self.grad_checkpointing else block(x)
            if i in taken:
                maps.append(self.normed(x) if norm else x)
        return maps if intermediates_only else (self.normed(x), maps)
