"""A made-up run folder whose layers became attention during training. `make_scheduled(...)` writes one.

To look at the page: python tests/report/conftest.py RUN; python tests/report/scheduled/conftest.py RUN name=learned
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

HEADS = 9


def schedule_run(
    folder: Path,
    *,
    name: str = "progressive",
    epochs: int = 14,
    trained: int | None = None,
    layers: int = 6,
    gate: str = "bias",
    pretrained: bool = False,
) -> Path:
    """Turn a run folder into one of a schedule that has got to epoch `trained`: 9 % to about 60 % top-1."""
    trained = epochs if trained is None else trained
    names = [f"blocks.{index}.mixer" for index in range(layers)]
    dates = dates_of(name, names, epochs, trained)
    recipe = yaml.safe_load((folder / "recipe.yaml").read_text(encoding="utf-8"))
    recipe |= {"epochs": epochs, "schedule": {"name": name}, "recast": recipe["recast"] | {"gate": gate}}
    recipe["model"] |= {"name": "cmhsa_vit_3_tiny", "checkpoint": None if pretrained else "parent.safetensors"}
    recipe["model"]["pretrained"] = pretrained
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False), encoding="utf-8")
    plan = json.loads((folder / "plan.json").read_text(encoding="utf-8"))
    plan["steps"] = [plan["steps"][1] | {"name": layer} for layer in names]
    _json(folder / "plan.json", plan)
    if (folder / "verify.json").exists():
        verify = json.loads((folder / "verify.json").read_text(encoding="utf-8"))
        exact = {"max_relative_error": 3.1e-7, "bitwise": False, "argmax_agreement": 1.0}
        _json(folder / "verify.json", verify | exact)
    rows = _metrics(folder / "metrics.jsonl", np.random.default_rng(1), trained, epochs, 60.4, dates, gate)
    if (folder / "finetuned").is_dir():
        _metrics(folder / "finetuned" / "metrics.jsonl", np.random.default_rng(2), trained, epochs, 58.1, {}, gate)
    _json(folder / "schedule.json", schedule(name, names, dates, epochs, trained, rows))
    return folder


def dates_of(name: str, names: list[str], epochs: int, trained: int) -> dict[str, int]:
    """progressive: PRS Eq. 7. at_once: in the middle. learned: four layers, as far as it has got."""
    last = len(names) + 1
    if name == "progressive":
        return {layer: epochs * (last - number) // last + 1 for number, layer in enumerate(names, start=1)}
    if name == "at_once":
        return dict.fromkeys(names, epochs // 2 + 1)
    if name == "learned":
        found = {names[place]: date for place, date in ((4, 4), (5, 5), (2, 9), (1, 12))}
        return {layer: date for layer, date in found.items() if date <= trained + 1}
    return {}


def schedule(
    name: str, names: list[str], dates: dict[str, int], epochs: int, trained: int, rows: list[dict[str, Any]]
) -> dict[str, Any]:
    """schedule.json: a switch costs 0.03 of the loss and 0.4 points, but the first of all costs four times that."""
    switches = []
    for date in sorted({date for date in dates.values() if date <= trained}):
        before = {key: rows[date - 1][key] for key in ("val_loss", "val_top1")}
        cost = 1 if switches else 4
        after = {"val_loss": before["val_loss"] + 0.03 * cost, "val_top1": before["val_top1"] - 0.4 * cost}
        layers = [layer for layer in names if dates.get(layer) == date]
        switches.append({"epoch": date, "layers": layers, "before": before, "after": after})
    probes = []
    for epoch in range(1, min(trained, epochs - 1) + 1) if name == "learned" else ():
        waiting = [layer for layer in names if dates.get(layer, epochs + 1) > epoch]
        chosen = next((layer for layer in names if dates.get(layer) == epoch + 1), None)
        delivered = None if epoch == 1 else 0.5 / epoch
        promised = {layer: 0.02 + 0.004 * names.index(layer) + 0.002 * epoch for layer in waiting}
        if chosen is not None:
            promised[chosen] = 0.5 / epoch + 0.02
        probe = {"epoch": epoch, "train_loss": 2.0 / epoch, "delivered": delivered, "promised": promised}
        probes.append(probe | {"chosen": [] if chosen is None else [chosen]})
    return {"version": 1, "name": name, "layers": names, "dates": dates, "epochs": epochs} | {
        "switches": switches,
        "probes": probes,
    }


def _metrics(
    path: Path, random: np.random.Generator, trained: int, epochs: int, end: float, dates: dict[str, int], gate: str
) -> list[dict[str, Any]]:
    rows = []
    for epoch in range(trained + 1):
        top1 = 9.2 + (end - 9.2) * (1 - np.exp(-3 * epoch / epochs)) / (1 - np.exp(-3)) + random.normal(0, 0.4)
        layers = {}
        for layer, date in dates.items() if gate != "bias" else ():
            if date <= epoch:
                share = np.linspace(-0.02, 0.1, HEADS) * (epoch - date + 1) / epochs
                layers[layer] = {"gate": gate, "gamma": share.tolist(), "s": (-share / 2).tolist()}
                layers[layer]["span"] = (1 + share).tolist()
        row = {"epoch": epoch, "train_loss": (95 - top1) / 25 if epoch else None, "val_loss": (98 - top1) / 25}
        rows.append(row | {"val_top1": float(top1), "layers": layers})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return rows


def _json(path: Path, found: object) -> None:
    path.write_text(json.dumps(found, indent=1), encoding="utf-8")


@pytest.fixture
def make_scheduled(make_run: Callable[..., Path]) -> Callable[..., Path]:
    """`make_scheduled(run="run", rows=..., control=..., verify=..., **options of schedule_run)`."""

    def make(run: str = "run", **options: Any) -> Path:
        kept = {key: options.pop(key) for key in ("rows", "control", "verify") if key in options}
        return schedule_run(make_run(run, **{"rows": False, "attention": False} | kept), **options)

    return make


if __name__ == "__main__":
    words = dict(word.split("=", 1) for word in sys.argv[2:])
    numbers = {key: int(value) for key, value in words.items() if value.isdigit()}
    schedule_run(Path(sys.argv[1]), **words | numbers)  # type: ignore[arg-type]
