"""What the analyses look at: batches of images, the blocks of a network, and the maps between them as they are made."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torchvision.models.swin_transformer import SwinTransformer
from torchvision.ops.misc import ConvNormActivation

from recast.analysis.transformers import Grids, watched_grids
from recast.errors import RecastError, suggest
from recast.modes import in_eval
from recast.tracing.hooks import hooked

STEM = "stem"
_CONTAINERS = "blocks stages layers features encoder trunk_output layer1 layer2 layer3 layer4".split()
_WRAPPED = (["model"], ["module"], ["_orig_mod"])
"""The only children of `PixelModel`, DistributedDataParallel and `torch.compile`."""
_MIXERS = ("attn", "self_attention", "mixer", "token_mixer")

Keep = Callable[[str, Tensor], None]
ImageBatches = Tensor | Iterable[Tensor | tuple[Tensor, ...] | list[Tensor]]
"""(B, 3, H, W), or an iterable of such batches, labels beside them or not."""


def each_batch(images: ImageBatches) -> Iterator[Tensor]:
    """Yield the batches of images. Raises `RecastError` if there is none, or for a tensor of another shape."""
    empty = True
    for batch in (images,) if isinstance(images, Tensor) else images:
        pixels = batch[0] if isinstance(batch, tuple | list) and len(batch) else batch
        if not isinstance(pixels, Tensor) or pixels.dim() != 4 or 0 in pixels.shape:
            got = tuple(pixels.shape) if isinstance(pixels, Tensor) else type(pixels).__name__
            raise RecastError(f"images must be tensors (B, C, H, W), got {got}")
        empty = False
        yield pixels
    if empty:
        raise RecastError("images is empty: pass at least one batch")


def body_of(model: nn.Module) -> tuple[str, nn.Module]:
    """Return the network inside modules that only hold it (`_WRAPPED`), and the prefix of its names."""
    prefix = ""
    while [name for name, _ in model.named_children()] in _WRAPPED:
        ((name, model),) = model.named_children()
        prefix = f"{prefix}{name}."
    return prefix, model


def find_blocks(network: nn.Module) -> list[str]:
    """Return the names of the blocks of `network`, in the order of its modules.

    A timm network names them itself (`group_matcher`, made for layer-wise learning rates): residual blocks, without
    the downsampling between stages. In others they are the members of `layer1` … `layer4`, `blocks`, `stages`,
    `layers`, `features` or `encoder`, however nested. Raises `RecastError` where there is no such sequence.
    """
    for name, module in network.named_modules():
        if blocks := _named_by_matcher(module) or _named_by_structure(module):
            return [f"{name}.{block}" if name else block for block in blocks]
    if isinstance(network, nn.Sequential) and len(network) > 1:
        return _composed(network, _expand(network, ""))
    raise RecastError(
        f"{type(network).__name__} has no known sequence of blocks: pass blocks=[...] (see named_modules())"
    )


def _named_by_matcher(module: nn.Module) -> list[str]:
    matcher = getattr(module, "group_matcher", None)
    groups = matcher() if callable(matcher) else None
    if not isinstance(groups, dict):
        return []
    blocks = groups.get("blocks", ())
    # An entry with a number of its own is put beside a block (a norm, a downsampling): it is none itself.
    patterns = [blocks] if isinstance(blocks, str) else [pattern for pattern, group in blocks if group is None]
    return [name for name, _ in module.named_modules() if any(re.fullmatch(p, name) for p in patterns)]


def _named_by_structure(module: nn.Module) -> list[str]:
    if type(module) is nn.Sequential:
        return []
    members = [block for name in _CONTAINERS if hasattr(module, name) for block in _expand(getattr(module, name), name)]
    members = _composed(module, members)
    return members if len(members) > 1 else []  # one member of something is no sequence


def _expand(module: object, name: str) -> list[str]:
    """Return the names of a container's members and of theirs, of all containers in a module, or of the module."""
    if isinstance(module, nn.Sequential | nn.ModuleList) and not isinstance(module, ConvNormActivation):
        children = list(module.named_children())
    elif isinstance(module, nn.Module):
        children = [(child, getattr(module, child)) for child in _CONTAINERS if hasattr(module, child)]
    else:
        return []
    if not children:
        return [name]
    return [block for child, inner in children for block in _expand(inner, f"{name}.{child}" if name else child)]


def _composed(module: nn.Module, names: list[str]) -> list[str]:
    """Return the modules that are made of others; all of them if none is (a plain chain of layers)."""
    blocks = [(name, module.get_submodule(name)) for name in names]
    composed = [name for name, block in blocks if any(block.children()) and not isinstance(block, ConvNormActivation)]
    return composed or names


class BlockSequence:
    """Points of a network: before its first block (`stem`), and after every block.

    In a transformer's block with an attention (or another mixer) and an MLP there are two points, after the residual
    of each: the first has the mixer's name, the second the block's. `blocks` names other modules, whose outputs are
    the points. Names are those of the network inside wrappers (`body_of`): parent and recast network share them.
    """

    def __init__(self, model: nn.Module, blocks: Sequence[str] | None) -> None:
        self.model = model
        prefix, self.network = body_of(model)
        self.is_given = blocks is not None
        names = find_blocks(self.network) if blocks is None else [name.removeprefix(prefix) for name in blocks]
        if not names:
            raise RecastError("blocks must name at least one module, got none")
        modules = dict(self.network.named_modules())
        for name in names:
            if name not in modules:
                raise RecastError(f"{type(self.network).__name__} has no module {name!r}.{suggest(name, modules)}")
        self.blocks = {name: modules[name] for name in names}
        self._widths = {name: _widths(block) for name, block in self.blocks.items()}
        self._current = names[0]
        layout = "NHWC" if isinstance(self.network, SwinTransformer) else getattr(self.network, "output_fmt", None)
        self._channels_last = {"NHWC": True, "NCHW": False}.get(str(layout))
        self._grids = Grids()

    @torch.no_grad()
    def run(self, images: Tensor, keep: Keep) -> None:
        """Run images in eval mode, and call `keep(name, output)` once at every point, in order."""
        blocks = {} if self.is_given else self.blocks
        middles = [point for name, block in blocks.items() for point in _middle(name, block)]
        reported: set[str] = set()

        def once(name: str, output: Any) -> None:
            tensor = output[0] if isinstance(output, tuple | list) and output else output
            if name not in reported and isinstance(tensor, Tensor):
                reported.add(name)
                keep(name, tensor)

        def enter(name: str, _block: nn.Module, inputs: tuple[Any, ...]) -> None:
            self._see(name, inputs[0] if inputs else None)
            if name == next(iter(blocks), None):
                once(STEM, inputs)

        def leave(name: str, _block: nn.Module, _inputs: Any, output: Any) -> None:
            self._see(name, output)
            once(name, output)

        with (
            in_eval(self.model),
            watched_grids(self.network) as self._grids,
            hooked(self.blocks.items(), before=enter, after=leave),
            hooked(middles, before=lambda name, _module, inputs: once(name, inputs)),
        ):
            self.model(images.to(device_of(self.model), copy=True))  # a network may write into its input

    def _see(self, block: str, value: Any) -> None:
        self._current = block
        if isinstance(value, Tensor) and value.dim() == 4:
            self._grids.see(self._turned(value))

    def _turned(self, x: Tensor) -> Tensor:
        """Permute NHWC to NCHW. The layout is that of `output_fmt`, or follows from the widths of linear layers."""
        last, widths = self._channels_last, self._widths[self._current]
        if last is None:
            last = x.shape[-1] in widths and x.shape[1] not in widths
        return x.permute(0, 3, 1, 2) if last else x

    def as_map(self, name: str, x: Tensor) -> Tensor:
        """Return an output as a map (B, C, h, w): NHWC permuted, tokens (B, N, C) on their grid, without a prefix.

        The grid is that of the latest map that fits (a patch embedding's convolution makes one), so images need not be
        square. Raises `RecastError` for what is no map.
        """
        if x.dim() == 4:
            return self._turned(x)
        if x.dim() == 3 and (grid := self._grids.of(x.shape[0], x.shape[1])) is not None:
            return x[:, -grid[0] * grid[1] :].transpose(1, 2).unflatten(-1, grid)
        raise RecastError(
            f"{name} returns {tuple(x.shape)}, neither a map (B, C, h, w) nor its tokens (B, N, C): pass other "
            "modules, blocks=[...]"
        )


def _middle(name: str, block: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the modules that may see the state after the first residual of a transformer's block first.

    They are its second norm, and its MLP if norms follow.
    """
    mixer = next((mixer for mixer in _MIXERS if isinstance(getattr(block, mixer, None), nn.Module)), None)
    norm = getattr(block, "norm2", getattr(block, "ln_2", None))
    mlp = getattr(block, "mlp", None)
    if mixer is None or not isinstance(norm, nn.Module) or not isinstance(mlp, nn.Module):
        return []
    return [(f"{name}.{mixer}", norm), (f"{name}.{mixer}", mlp)]


def _widths(block: nn.Module) -> set[int]:
    """Return the input channels of a block's first linear layer, and the output channels of its last one."""
    linear = [module for module in block.modules() if isinstance(module, nn.Linear)]
    return {linear[0].in_features, linear[-1].out_features} if linear else set()


def device_of(model: nn.Module) -> torch.device:
    """Return the device of the parameters; the CPU for a model without any."""
    return next((tensor.device for tensor in model.parameters()), torch.device("cpu"))
