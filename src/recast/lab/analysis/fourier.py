"""Frequencies of a network's maps: Δ log amplitude after every block."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from recast.errors import RecastError
from recast.lab.analysis.blocks import BlockSequence, ImageBatches, each_batch
from recast.lab.folder.records import FourierLine
from recast.lab.folder.tables import Table

FREQUENCIES = tuple(i / 30 for i in range(31))
"""Where curves are read, in units of π; 1/3, 2/3 and 1 are among them."""
EPSILON = 1e-6


@dataclass(frozen=True)
class Curve:
    """The spectrum of one block's maps."""

    block: str
    index: int
    """Its place in the sequence, from 0."""
    depth: float
    """index / (number of blocks − 1)."""
    frequency: tuple[float, ...]
    """In units of π."""
    delta: tuple[float, ...]
    """Δ log amplitude: 0 at frequency 0, mostly negative elsewhere; natural logarithm."""
    size: tuple[int, int]
    """Rows and columns of the maps."""


@dataclass(frozen=True)
class FourierCurves:
    """The spectra of a network's maps, in the order of its blocks."""

    curves: tuple[Curve, ...]
    left_out: dict[str, str]
    """Points without a curve and why, such as maps of one pixel: they have no frequency but 0."""
    n: int
    """Images behind the means."""


def fourier(model: nn.Module, images: ImageBatches, *, blocks: Sequence[str] | None = None) -> FourierCurves:
    """Compute the Δ log amplitude of a network's maps after every block, over images.

        a(f) = mean over images and channels of log(|x̂(f, f)| + 1e-6)        x̂ the unnormalised 2-D DFT of a channel
        Δ(f) = a(f) − a(0)                                                   f along the diagonal, in units of π

    (Park & Kim 2022, How Do Vision Transformers Work?; Lee et al. 2022, PRS, Fig. 2 and 3.)
    High frequencies that a block amplifies raise its curve, a low-pass filter lowers it. Curves are read in front of
    the first block (`stem`: with the pooling of a ResNet, the positions of a transformer) and after every block; in a
    transformer after both residuals of a layer, class tokens left out (`BlockSequence`).

    The diagonal runs from (0, 0) to (π, π); where a map is not square, between the bins of its longer side by linear
    interpolation. Curves are read at `FREQUENCIES`, by linear interpolation between the bins 2n/h, π being the bin h/2
    of an even h (which a shifted DFT has at its other end). An odd h has no bin at π: there its last, (h−1)/h, is held.
    White noise has Δ = ln 2 / 2, but 0 at π of an even h: there and at 0 x̂ is real. So compare maps of one size.

    Args:
        images: (B, 3, H, W), or an iterable of such batches, with labels or without; only sums are stored. They should
            be those of the training, with its normalisation, and of one size.
        blocks: names of modules whose outputs are measured instead.

    Returns:
        The curves; `left_out` names maps that are too small for two bins (1×1).

    Raises:
        RecastError: for a network without a known sequence of blocks, missing blocks or blocks without a map, and
            images of several sizes.
    """
    return _measure({"": model}, images, blocks)[""]


def tabulate_fourier(models: Mapping[str, nn.Module], images: ImageBatches) -> Table:
    """Return RUN/analysis/fourier.csv, a row per model, block and frequency, from one pass over the images.

    Raises `RecastError` as `fourier` does.
    """
    lines = [
        FourierLine(name, curve.block, curve.index, curve.depth, *point, spectra.n)
        for name, spectra in _measure(models, images, None).items()
        for curve in spectra.curves
        for point in zip(curve.frequency, curve.delta, strict=True)
    ]
    return Table.of("fourier", FourierLine, lines)


def _measure(
    models: Mapping[str, nn.Module], images: ImageBatches, blocks: Sequence[str] | None
) -> dict[str, FourierCurves]:
    """Compute the curves of every model in one pass over the images."""
    spectra = {name: _Spectra(BlockSequence(model, blocks)) for name, model in models.items()}
    n = 0
    for batch in each_batch(images):
        n += len(batch)
        for sums in spectra.values():
            sums.sequence.run(batch, sums.add)
    return {name: sums.curves(n) for name, sums in spectra.items()}


class _Spectra:
    """Sums of log amplitudes after every block of a model, batch by batch."""

    def __init__(self, sequence: BlockSequence) -> None:
        self.sequence = sequence
        self._sums: dict[str, tuple[tuple[int, int], Tensor]] = {}
        self._left_out: dict[str, str] = {}

    def add(self, name: str, output: Tensor) -> None:
        """Add the output of a block."""
        try:
            maps = self.sequence.as_map(name, output)
        except RecastError as error:
            if self.sequence.is_given or output.dim() == 3:  # tokens in an order that is not known: so are all others
                raise
            self._left_out[name] = str(error)
            return
        size = (maps.shape[-2], maps.shape[-1])
        dtype = torch.float32 if maps.device.type == "mps" else torch.float64
        sums = diagonal_log_amplitude(maps).mean(1).sum(0, dtype=dtype).cpu().double()
        before, total = self._sums.get(name, (size, torch.zeros_like(sums)))
        if before != size:
            raise RecastError(
                f"{name} returns maps of {size[0]}×{size[1]} after {before[0]}×{before[1]}: pass images of one size"
            )
        self._sums[name] = size, total + sums

    def curves(self, n: int) -> FourierCurves:
        """Return the curves of n images."""
        curves, left_out = [], dict(self._left_out)
        for index, (name, (size, sums)) in enumerate(self._sums.items()):
            amplitudes = (sums / n).numpy()
            if len(amplitudes) < 2:
                left_out[name] = f"maps of {size[0]}×{size[1]} hold no frequency but 0"
                continue
            bins = 2 * np.arange(len(amplitudes)) / min(size)
            delta = np.interp(FREQUENCIES, bins, amplitudes - amplitudes[0])
            depth = index / max(1, len(self._sums) - 1)
            curves.append(Curve(name, index, depth, FREQUENCIES, tuple(delta.tolist()), size))
        return FourierCurves(tuple(curves), left_out, n)


def diagonal_log_amplitude(maps: Tensor) -> Tensor:
    """Compute log(|x̂| + 1e-6) along the diagonal (0, 0) to (π, π): (B, C, h, w) → (B, C, ⌊s/2⌋+1), s = min(h, w).

    Entry n is at the frequency 2n/s of both axes, in units of π. The longer axis has no bin there in general: it is
    interpolated between the two beside it, past its last bin (odd, s even) that one is taken.
    """
    height, width = maps.shape[-2:]
    short = min(height, width)
    amplitudes = torch.fft.rfft2(maps.to(torch.promote_types(maps.dtype, torch.float32))).abs()
    steps = torch.arange(short // 2 + 1, device=maps.device)

    def bins(size: int) -> tuple[Tensor, Tensor]:
        """Return the bins below and above frequency 2n/short; integers, so that a square map meets its bins exactly."""
        below = (steps * size).div(short, rounding_mode="floor").clamp(max=size // 2)
        inexact = (steps * size) % short != 0
        return below, (below + inexact.long()).clamp(max=size // 2)

    (row, row_above), (column, column_above) = bins(height), bins(width)
    logs = torch.log(amplitudes[..., row, column] + EPSILON)
    if height == width:
        return logs
    share = (steps * max(height, width) % short).to(logs.dtype) / short
    return torch.lerp(logs, torch.log(amplitudes[..., row_above, column_above] + EPSILON), share)
