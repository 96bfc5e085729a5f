"""Two processes with 32 images each against one with 64: the losses of 20 updates, and what the validation says.

    RECAST_DATA=DIR python benchmarks/processes.py        # writes results/processes.csv; two minutes on two CPU cores

CIFAR-100 ResNet-20, last stage recast, BatchNorm frozen (it sees one process's images at a time), AdamW 1e-4, crop and
flip, gloo; 999 validation images: an odd number. A third run, one process that computes each batch in two parts, adds
the same numbers in another order: what it differs by is rounding, which training magnifies; float64 shows the rest.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from timing import RESULTS, write_table

from recast.data import load_data
from recast.models.build import build
from recast.run.config import DataConfig, ModelConfig, OptimConfig, Recipe, RegularizationConfig
from recast.surgery.apply import recast_
from recast.surgery.planning import plan
from recast.training.loop import fit

DTYPES = ("float32", "float64")
RESULT = RESULTS / "processes.csv"


def run(folder: Path, dtype: str, parts: int) -> None:
    """Train; losses.json of the first process has every update's loss and the last row."""
    root = Path(os.environ["RECAST_DATA"])
    recipe = Recipe(
        model=ModelConfig("cifar_resnet20", str(root / "weights" / "cifar100_resnet20_chenyaofo.safetensors")),
        data=DataConfig("cifar100", data_dir=str(root / "cifar100"), batch_size=64, num_train=1280, num_val=999),
        optim=OptimConfig(lr=1e-4),
        regularization=RegularizationConfig(freeze_bn=True),
        epochs=1,
        accumulate=parts,
        device="cpu",
    )
    torch.set_num_threads(1)
    parent = build(recipe.model, num_classes=100)
    torch.manual_seed(0)
    child = recast_(parent, plan(parent, torch.zeros(1, 3, 32, 32)))
    child.to(getattr(torch, dtype)).register_forward_pre_hook(lambda _, images: images[0].to(getattr(torch, dtype)))
    losses: list[float] = []
    rows = fit(
        child, load_data(recipe.data, recipe.augment), recipe, folder, progress=False,
        on_step=lambda _epoch, _step, loss: losses.append(loss),
    )  # fmt: skip
    if os.environ.get("RANK", "0") == "0":
        found = {"losses": losses, "val_loss": rows[-1]["val_loss"], "val_top1": rows[-1]["val_top1"]}
        (folder / "losses.json").write_text(json.dumps(found), encoding="utf-8")


def main() -> None:
    """All runs, and the comparison."""
    if len(sys.argv) > 1:
        run(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
        return
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for dtype in DTYPES:
            found = []
            for name, command, parts in (
                ("one", [sys.executable], 1),
                ("parts", [sys.executable], 2),
                ("two", torchrun, 1),
            ):
                folder = Path(scratch) / f"{name}-{dtype}"
                subprocess.run([*command, __file__, str(folder), dtype, str(parts)], check=True)
                found.append(json.loads((folder / "losses.json").read_text(encoding="utf-8")))
            steps = enumerate(zip(*(f["losses"] for f in found), strict=True), 1)
            rows += [[dtype, f"loss of update {step}", *values] for step, values in steps]
            rows += [[dtype, f"{name} of 999 images", *(f[name] for f in found)] for name in ("val_loss", "val_top1")]
    write_table(
        RESULT,
        ["dtype", "what", "one_of_64", "one_in_two_parts", "two_of_32", "parts_differ", "two_differ"],
        ([*row, abs(row[3] - row[2]) / row[2], abs(row[4] - row[2]) / row[2]] for row in rows),
    )
    for dtype in DTYPES:
        largest = max(abs(two - one) / one for name, _, one, _, two in rows if name == dtype)
        print(f"{dtype}: two processes differ from one by {largest:.1e} at most; {RESULT}")


if __name__ == "__main__":
    main()
