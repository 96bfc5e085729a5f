"""Changes to the files of a run folder, and the numbers in a chart."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from recast.config import read
from recast.lab.config import Recipe
from recast.lab.config.text import override
from recast.lab.evaluation.image_values import ImageValues, write_images
from recast.lab.folder.records import Difference, Row, write_records
from recast.lab.folder.tables import read_records
from recast.lab.pages.charts import Chart


def rewrite(path: Path, **changes: Any) -> None:
    """Change the first level of a JSON file."""
    content = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(content | changes), encoding="utf-8")


def set_recipe(path: Path, changes: Mapping[str, Any]) -> None:
    """Change fields of a run's recipe, named as in `optim.lr`."""
    nested: dict[str, Any] = {}
    for name, value in changes.items():
        section, _, key = name.rpartition(".")
        (nested.setdefault(section, {}) if section else nested)[key] = value
    recipe = read(Recipe, yaml.safe_load((path / "recipe.yaml").read_text(encoding="utf-8")))
    text = yaml.safe_dump(override(recipe, nested).model_dump(mode="json"), sort_keys=False)
    (path / "recipe.yaml").write_text(text, encoding="utf-8")


def set_values(path: Path, suite: str, metric: str, values: Mapping[str, float], n: int = 360, half: float = 0) -> None:
    """Replace a number of rows.csv by arm, without intervals, or with ± `half` and paired ones of ± 0.6 `half`."""
    rows = [row for row in read_records(path / "rows.csv", Row) if (row.suite, row.metric) != (suite, metric)]
    for arm, value in values.items():
        low, high = (value - half, value + half) if half else (None, None)
        rows.append(Row("run", arm, suite, "digits", metric, value, n, low, high))
    write_records(path / "rows.csv", Row, rows)
    lines = read_records(path / "differences.csv", Difference)
    lines = [line for line in lines if (line.suite, line.metric) != (suite, metric)]
    for arm in ("parent", "finetuned") if half else ():
        gap = values["recast"] - values[arm]
        low, high = gap - 0.6 * half, gap + 0.6 * half
        lines.append(Difference("run", "recast", arm, suite, "digits", metric, gap, low, high, n))
    (path / "differences.csv").unlink()
    write_records(path / "differences.csv", Difference, lines)


def set_images(path: Path, right: Mapping[str, int], n: int = 360) -> None:
    """Replace the top-1 of a run: of n images, each arm gets the first ones right."""
    set_values(path, "clean", "top1", {arm: 100 * count / n for arm, count in right.items()}, n)
    values = {arm: ImageValues(100.0 * (np.arange(n) < count), True) for arm, count in right.items()}
    images = {("clean", "top1", arm): each for arm, each in values.items()}
    write_images(path / "scores" / "images.npz", images, {"clean"})


def rows_where(chart: Chart, **values: object) -> list[dict[str, Any]]:
    """Return the points of the series that have a name, those with these values."""
    settings = chart.panel.keywords
    names = settings.get("xticks") or {}
    rows = [
        {"series": line.label or line.end, "value": point.y, **point._asdict(), "x": names.get(point.x, point.x)}
        for line in settings["series"]
        if line.label or line.end
        for point in line.points
    ]
    return [row for row in rows if all(row[key] == value for key, value in values.items())]


def series_of(*charts: Chart) -> set[str]:
    """Return the names of the series of charts."""
    return {row["series"] for chart in charts for row in rows_where(chart)}
