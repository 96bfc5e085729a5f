"""A whole run beside a bare script that does the same: `recast train`, `evaluate` and `report`, phase by phase.

    RECAST_DATA=DIR python benchmarks/whole.py --out runs/whole       # writes results/whole.csv; 10 minutes on 2 cores

CIFAR-100 ResNet-20 with a new head goes on learning on CIFAR-10, as it is and with its last stage recast; parent,
fine-tuned and recast network are then measured clean and under FGSM. The bare script is what one would write by hand
with `recast_` as its one call of ours: images in one tensor, crop and flip by index, AdamW, top-1 after every epoch.
It makes no plan, no proof, no probe, no interval, no file but the weights. Both are processes of their own, by turns;
every phase begins with a new one, imports included. Beside `train --help` stands `import torch, timm`; the ratio of
`intervals of evaluate` is their part of evaluate's seconds.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from timing import RESULTS, by_turns, machine, ratio, write

ROOT = Path(os.environ.get("RECAST_DATA", "data"))
WEIGHTS = str(ROOT / "weights" / "cifar100_resnet20_chenyaofo.safetensors")
BATCH, LR, GATE_LR, EPS, VAL = 100, 1e-3, 1e-2, 1 / 255, 1000
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


def images_of(num_train: int) -> list[tuple[Any, Any]]:
    """(N, 3, 32, 32) in [0, 1] and labels, the same number of each class: for training and for validation."""
    import torch

    from recast.data import load_data
    from recast.run.config import DataConfig

    data = load_data(DataConfig("cifar10", data_dir=str(ROOT / "cifar10"), num_train=num_train, num_val=VAL))
    return [(torch.stack([part[i][0] for i in range(len(part))]), part.labels) for part in (data.train, data.val)]


def networks() -> dict[str, Any]:
    """The two networks that learn."""
    import torch

    import recast
    from recast.models.build import build
    from recast.run.config import ModelConfig

    torch.manual_seed(0)
    control = build(ModelConfig("cifar_resnet20", WEIGHTS, new_head=True, num_classes=10), num_classes=10)
    recast_arm = build(ModelConfig("cifar_resnet20", WEIGHTS, new_head=True, num_classes=10), num_classes=10)
    found = recast.plan(recast_arm, torch.zeros(1, 3, 32, 32))
    return {"parent": control, "finetuned": control, "recast": recast.recast_(recast_arm, found)}


def bare_train(out: Path, num_train: int, epochs: int) -> None:
    """Train both arms by hand."""
    import torch
    from safetensors.torch import save_model
    from torch.nn import functional as F

    from recast.surgery.parameters import param_groups

    (images, labels), (val, val_labels) = images_of(num_train)
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (MEAN, STD))
    rows = torch.arange(32).view(1, 32, 1)
    for name, model in networks().items():
        if name != "parent":
            optimizer = torch.optim.AdamW(param_groups(model, lr=LR, gate_lr=GATE_LR))
            schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * (num_train // BATCH))
        for _ in range(epochs if name != "parent" else 0):
            model.train()
            for chosen in torch.randperm(num_train).split(BATCH):
                padded = F.pad(images[chosen], (4, 4, 4, 4))
                down, right = torch.randint(9, (2, len(chosen), 1, 1))
                columns = torch.where(torch.rand(len(chosen), 1, 1) < 0.5, 31 - rows.mT, rows.mT) + right
                batch = padded.permute(0, 2, 3, 1)[torch.arange(len(chosen)).view(-1, 1, 1), rows + down, columns]
                logits = model((batch.permute(0, 3, 1, 2).contiguous() - mean) / std)
                loss = F.cross_entropy(logits, labels[chosen])
                optimizer.zero_grad(set_to_none=True)
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
            model.eval()
            with torch.no_grad():
                right = sum(
                    int((model((part - mean) / std).argmax(1) == true).sum())
                    for part, true in zip(val.split(250), val_labels.split(250), strict=True)
                )
            print(name, right / VAL)
        save_model(model, str(out / f"{name}.safetensors"))


def bare_evaluate(out: Path) -> None:
    """Top-1 of three arms, clean and under FGSM."""
    import torch
    from safetensors.torch import load_model
    from torch.nn import functional as F

    val, val_labels = images_of(BATCH)[1]
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (MEAN, STD))
    for name, model in networks().items():
        load_model(model.eval(), str(out / f"{name}.safetensors"))
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        clean = attacked = 0
        for part, true in zip(val.split(250), val_labels.split(250), strict=True):
            part = part.clone().requires_grad_()
            logits = model((part - mean) / std)
            (gradient,) = torch.autograd.grad(F.cross_entropy(logits, true, reduction="sum"), part)
            moved = (part + EPS * gradient.sign()).clamp(0, 1).detach()
            clean += int((logits.argmax(1) == true).sum())
            with torch.no_grad():
                attacked += int((model((moved - mean) / std).argmax(1) == true).sum())
        print(name, clean / VAL, attacked / VAL)


def intervals(run: Path) -> None:
    """Evaluate a run anew and print which part of its seconds intervals and differences took."""
    from recast.evaluation.run_folder import evaluate_run
    from recast.evaluation.stats import Resampled
    from recast.run.config.evaluation import Options

    spent = 0.0

    def timed(call: Callable[..., Any]) -> Callable[..., Any]:
        def measured(*args: Any, **kwargs: Any) -> Any:
            nonlocal spent
            started = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                spent += time.perf_counter() - started

        return measured

    for name in ("__init__", "rows", "differences"):
        setattr(Resampled, name, timed(getattr(Resampled, name)))
    started = time.perf_counter()
    evaluate_run(run, ["clean", "fgsm"], options=Options(eps=(1.0,)), again=True, progress=False)
    print(spent / (time.perf_counter() - started))


def process(*words: str) -> str:
    """What a process printed."""
    return subprocess.run([sys.executable, *words], check=True, capture_output=True, text=True).stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/whole"))
    parser.add_argument("--num-train", type=int, default=2000)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--job", choices=("train", "evaluate", "intervals"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    out = options.out
    if options.job == "train":
        return bare_train(out, options.num_train, options.epochs)
    if options.job == "evaluate":
        return bare_evaluate(out)
    if options.job == "intervals":
        return intervals(out)
    out.mkdir(parents=True, exist_ok=True)
    run, size = out / "run", f"--num-train {options.num_train} --num-val {VAL} --epochs {options.epochs}".split()
    same = ["--num-train", str(options.num_train), "--epochs", str(options.epochs), "--out", str(out)]

    def trained() -> None:
        shutil.rmtree(run, ignore_errors=True)
        process(
            *"-m recast train finetune --model cifar_resnet20 --new-head --data cifar10 --crop pad".split(),
            *f"--device cpu --batch-size {BATCH} --lr {LR} --gate-lr {GATE_LR} --checkpoint {WEIGHTS}".split(),
            *["--data-dir", str(ROOT / "cifar10"), "--out", str(run), *size],
        )  # fmt: skip

    def three() -> list[str]:
        for name in ("run-1", "run-2"):
            shutil.copytree(run, out / name, dirs_exist_ok=True)
        return [str(run), str(out / "run-1"), str(out / "run-2"), "--out", str(out / "three.html")]

    phases: dict[str, dict[str, Callable[[], object]]] = {
        "train": {"recast": trained, "bare": lambda: process(__file__, *same, "--job", "train")},
        "evaluate": {
            "recast": lambda: process(
                *f"-m recast evaluate {run} --suite clean,fgsm --eps 1 --batch-size 250 --device cpu --again".split()
            ),
            "bare": lambda: process(__file__, *same, "--job", "evaluate"),
        },
        "report of one run": {"recast": lambda: process("-m", "recast", "report", str(run))},
        "report of three runs": {"recast": lambda: process("-m", "recast", "report", *three())},
        "train --help": {
            "recast": lambda: process("-m", "recast", "train", "--help"),
            "bare": lambda: process("-c", "import torch, timm"),
        },
    }
    rows: list[dict[str, Any]] = []
    for phase, arms in phases.items():
        seconds = by_turns(arms, options.rounds, warm=0 if phase == "train" else 1)
        times, bare = seconds["recast"], seconds.get("bare")
        ratios = [a / b for a, b in zip(times, bare, strict=True)] if bare else []
        rows.append(
            {
                "phase": phase, "seconds": round(statistics.median(times), 2),
                "bare_seconds": round(statistics.median(bare), 2) if bare else "",
                "ratio": round(ratio(times, bare), 3) if bare else "",
                "ratio_min": round(min(ratios), 3) if bare else "", "ratio_max": round(max(ratios), 3) if bare else "",
                "machine": machine(),
            }
        )  # fmt: skip
        print(rows[-1], flush=True)
    share = float(process(__file__, "--out", str(run), "--job", "intervals").split()[-1])
    rows.append({"phase": "intervals of evaluate", "ratio": round(share, 5), "machine": machine()})
    write(RESULTS / "whole.csv", rows)


if __name__ == "__main__":
    main()
