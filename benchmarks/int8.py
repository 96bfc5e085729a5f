"""int8 by ONNX Runtime of recast networks that were folded: what it costs in accuracy, and what it gives in speed.

    RECAST_DATA=DIR python benchmarks/int8.py        # writes results/int8.csv; ten minutes

Trained CIFAR ResNets, the last stage recast. "closed": no head opened, folded to a plain convnet. "3 of 9 open": three
heads of every layer at γ = s = 0.05, folded (they lose accuracy by that alone). Exported, then quantised: `dynamic`
(weights; activations as they come), `static` (both, by 96 training images; per channel, QDQ). top1: 2,000 test images;
`over_fp32`: median time of a batch of 32 over that of the fp32 file, by turns, one thread. `agree`: share of images put
into the class that the fp32 file puts them into. MatMul and Gemm are quantised dynamically, Conv too statically.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnxruntime
import torch
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_dynamic, quantize_static
from onnxruntime.quantization.shape_inference import quant_pre_process
from timing import RESULTS, machine, write
from torchvision.transforms.v2.functional import normalize
from trained import CIFAR, trained

import recast
from recast.data import Data, Loader
from recast.layers.gpsa import gpsa_layers
from recast.tracing.timing import time_models

BATCH, TESTED, CALIBRATED = 32, 2000, 96


class Images(CalibrationDataReader):
    """Training images in batches."""

    def __init__(self, images: np.ndarray, name: str) -> None:
        self.batches = iter([{name: part} for part in np.split(images, len(images) // BATCH)])

    def get_next(self) -> Any:
        return next(self.batches, None)


def images_of(part: Any, data: Data, count: int) -> tuple[np.ndarray, np.ndarray]:
    images, labels = next(iter(Loader(part, count)))
    return normalize(images, list(data.mean), list(data.std)).numpy(), labels.numpy()


def session(path: Path) -> Any:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def classes(path: Path, images: np.ndarray) -> np.ndarray:
    run = session(path)
    name = run.get_inputs()[0].name
    return np.concatenate([run.run(None, {name: part})[0].argmax(1) for part in np.array_split(images, 20)])


def files(folder: Path, fp32: Path, calibration: np.ndarray) -> dict[str, Path]:
    """The same network in fp32 and in int8."""
    name = session(fp32).get_inputs()[0].name
    found = {kind: folder / f"{kind}.onnx" for kind in ("prepared", "dynamic", "static")}
    quant_pre_process(str(fp32), str(found["prepared"]), skip_symbolic_shape=True)
    quantize_dynamic(str(found["prepared"]), str(found["dynamic"]), weight_type=QuantType.QInt8)
    quantize_static(
        str(found["prepared"]), str(found["static"]), Images(calibration, name), quant_format=QuantFormat.QDQ,
        per_channel=True, activation_type=QuantType.QUInt8, weight_type=QuantType.QInt8,
    )  # fmt: skip
    return {"fp32": fp32, "dynamic": found["dynamic"], "static": found["static"]}


def measure(weights: str, opened: bool, folder: Path) -> list[dict[str, Any]]:
    """A row for each file."""
    torch.manual_seed(0)
    parent, data = trained(weights, TESTED)
    example = torch.from_numpy(images_of(data.val, data, 2)[0])
    model = recast.recast_(parent, recast.plan(parent, example)).eval()
    for layer in gpsa_layers(model).values() if opened else ():
        with torch.no_grad():
            layer.gamma[::3] = layer.spread[::3] = 0.05
    recast.fold_(model)
    fp32 = folder / "fp32.onnx"
    recast.export(model, example, fp32)
    images, labels = images_of(data.val, data, TESTED)
    made = files(folder, fp32, images_of(data.train.plain(), data, CALIBRATED)[0])
    answers = {kind: classes(path, images) for kind, path in made.items()}
    runs = {kind: session(path) for kind, path in made.items()}
    name = runs["fp32"].get_inputs()[0].name
    calls = {kind: (lambda x, run=run: run.run(None, {name: x.numpy()})) for kind, run in runs.items()}
    times = time_models(calls, torch.from_numpy(images[:BATCH]), 5.0)
    return [
        {
            "weights": weights, "heads": "3 of 9 open" if opened else "closed", "file": kind,
            "top1": round(100 * float((answers[kind] == labels).mean()), 2),
            "agree": round(100 * float((answers[kind] == answers["fp32"]).mean()), 2),
            "over_fp32": round(statistics.median(times[kind]) / statistics.median(times["fp32"]), 2),
            "kilobytes": round(path.stat().st_size / 1024), "machine": machine(),
        }
        for kind, path in made.items()
    ]  # fmt: skip


def main() -> None:
    """All rows."""
    rows: list[dict[str, Any]] = []
    for weights in sys.argv[1:] or CIFAR:
        for opened in (False, True):
            with TemporaryDirectory() as folder:
                rows += measure(weights, opened, Path(folder))
            print(*rows[-3:], sep="\n", flush=True)
            write(RESULTS / "int8.csv", rows)


if __name__ == "__main__":
    main()
