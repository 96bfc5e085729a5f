import pickle
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from on_reports import set_recipe, set_values

from recast.lab.folder.records import ARMS, Row, write_records
from recast.lab.folder.tables import read_records
from recast.lab.pages.charts import Chart

FROZEN = Path(__file__).with_name("runs")

DRAWN: dict[bytes, Any] = {}


@pytest.fixture
def charts_drawn_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nearly all the time of a page goes into its charts, which are mostly those of the same frozen runs."""
    draw = Chart.svg.func  # type: ignore[attr-defined]

    def svg(chart: Chart) -> Any:
        key = pickle.dumps(chart)
        if key not in DRAWN:
            DRAWN[key] = draw(chart)
        return DRAWN[key]

    monkeypatch.setattr(Chart.svg, "func", svg)


@pytest.fixture
def make_run(tmp_path: Path) -> Any:
    """A copy of a frozen run: `make_run(name, top1={arm: percent}, recipe={...}, without=[files], epochs=2)`."""

    def make(
        name: str = "run",
        source: str = "before",
        top1: Mapping[str, float] | None = None,
        recipe: Mapping[str, Any] | None = None,
        without: tuple[str, ...] = (),
        epochs: int = 3,
        control: int = 3,
    ) -> Path:
        path = tmp_path / name
        shutil.copytree(FROZEN / source, path)
        if top1 is not None:
            rows = [row for row in read_records(path / "rows.csv", Row) if row.suite != "clean"]
            (path / "rows.csv").unlink()
            write_records(path / "rows.csv", Row, rows)
            set_values(path, "clean", "top1", top1)
        set_recipe(path, recipe or {})
        for file, count in (("metrics.jsonl", epochs), ("finetuned/metrics.jsonl", min(epochs, control))):
            lines = (path / file).read_text(encoding="utf-8").splitlines(keepends=True)
            (path / file).write_text("".join(lines[: count + 1]), encoding="utf-8")
        for file in without:
            (shutil.rmtree if (path / file).is_dir() else Path.unlink)(path / file)
        return path

    return make


@pytest.fixture
def make_plain(make_run: Any) -> Any:
    """A run folder as `recast train --where none` and `recast evaluate` leave it."""

    def make(name: str = "plain") -> Path:
        absent = ("verify.json", "finetuned", "plan.json", "differences.csv", "analysis")
        path = make_run(name, recipe={"where": ["none"]}, without=absent)
        rows = (path / "rows.csv").read_text(encoding="utf-8").splitlines()
        kept = [row.replace(",parent,", ",finetuned,") for row in rows if not re.search(",(finetuned|recast),", row)]
        (path / "rows.csv").write_text("\n".join(kept) + "\n", encoding="utf-8")
        return path

    return make


@pytest.fixture
def make_measured(make_run: Any) -> Any:
    """A run of which every suite was measured; `gain` is what recast has more than the control arm, in points."""

    def make(name: str = "run", gain: float = 1.2, seed: int = 0) -> Path:
        path = make_run(name, recipe={"seed": seed})
        (path / "rows.csv").unlink()
        write_records(path / "rows.csv", Row, [])
        clean = {"parent": 74.2, "finetuned": 75.1, "recast": 75.1 + gain}
        drops = {
            ("clean", "top1"): 0.0,
            **{(suite, f"top1@{eps:g}"): 17 * eps for suite in ("fgsm", "pgd") for eps in (0.5, 1, 4)},
            **{("imagenet-c", f"top1/{kind}/{by}"): 9.0 * by for kind in ("fog", "snow") for by in (1, 5)},
            **{("basic", f"top1/{kind}/{by}"): 9.0 * by for kind in ("blur", "contrast") for by in (1, 5)},
            **{(suite, f"top1/mean/{by}"): 9.0 * by for suite in ("imagenet-c", "basic") for by in (1, 5)},
            ("imagenet-c", "top1/weather"): 27.0,
            ("imagenet-c", "top1/mean"): 27.0,
            ("imagenet-v2", "top1"): 48.0,
            **{("resolution", f"top1@{size}"): drop for size, drop in (("128x128", 9), ("160x192", 7), ("224x224", 5))},
            **{("knn", f"top1@{k}"): 10 - k / 5 for k in (1, 5)},
        }
        for (suite, metric), drop in drops.items():
            set_values(path, suite, metric, {arm: max(top1 - drop, 0.5) for arm, top1 in clean.items()}, 5000, 1.2)
        set_values(path, "clean", "loss", {arm: (100 - top1) / 25 for arm, top1 in clean.items()}, 5000, 0.01)
        set_values(path, "imagenet-c", "mce", {"parent": 71.0, "finetuned": 69.8, "recast": 67.1}, 5000, 1.2)
        for metric, cost in (("macs", 4.1e9), ("images_per_second", 812.0), ("peak_memory", 3.1e9)):
            set_values(path, "cost", metric, {arm: cost * (1.2 if arm == "recast" else 1) for arm in ARMS}, 64)
        return path

    return make
