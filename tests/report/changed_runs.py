"""Changes to the files of a run folder, for tests."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from recast.config import read
from recast.lab.config import Recipe
from recast.lab.recipe import override
from recast.lab.records import Difference, Row, write_records
from recast.lab.tables import read_records


def rewrite(path: Path, **changes: Any) -> None:
    """Change the first level of a JSON file."""
    found = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(found | changes), encoding="utf-8")


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
    ends = lambda value, wide: (value - wide, value + wide) if half else (None, None)  # noqa: E731
    rows += [Row("run", arm, suite, "digits", metric, value, n, *ends(value, half)) for arm, value in values.items()]
    write_records(path / "rows.csv", Row, rows)
    lines = read_records(path / "differences.csv", Difference)
    lines = [replace(line, suite="cut") if (line.suite, line.metric) == (suite, metric) else line for line in lines]
    for arm in ("parent", "finetuned") if half else ():
        gap = values["recast"] - values[arm]
        low, high = gap - 0.6 * half, gap + 0.6 * half
        lines.append(Difference("run", "recast", arm, suite, "digits", metric, gap, low, high, n))
    (path / "differences.csv").unlink()
    write_records(path / "differences.csv", Difference, [line for line in lines if line.suite != "cut"])
