import json
from typing import Any

import pytest

from recast.errors import RecastError
from recast.lab.report.load import read_run


def test_what_may_be_missing(make_run: Any) -> None:
    for name in ("plan.json", "metrics.jsonl"):
        with pytest.raises(RecastError, match=name):
            read_run(make_run(name, without=(name,)))
    without = ("verify.json", "environment.json", "rows.csv", "finetuned", "analysis")
    assert read_run(make_run(without=without)).epochs == 3


def test_a_line_of_a_killed_process_is_left_out(make_run: Any) -> None:
    path = make_run(source="during")
    content = (path / "metrics.jsonl").read_bytes()
    (path / "metrics.jsonl").write_bytes(content[: int(0.9 * len(content))])
    with pytest.warns(UserWarning, match=r"the report goes without .*metrics\.jsonl line \d+"):
        assert read_run(path).metrics


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("recipe.yaml", "a: [1", "recipe.yaml"),
        ("metrics.jsonl", "\n", "metrics.jsonl"),
        ("plan.json", '{"steps": [', "plan.json"),
        ("plan.json", '{"steps": [{"name": "a"}], "left": [], "edits": [], "totals": {}}', "plan.json"),
        ("verify.json", "[]", "verify.json"),
        ("rows.csv", "run,model,suite,dataset,metric,value,n,low,high\nrun,parent\n", r"rows\.csv line 2"),
        ("analysis/agreement.csv", "index,image\nx,a\n", r"agreement\.csv .* label"),
        ("schedule.json", '{"version": 2, "name": "", "layers": [], "dates": {}}', "version 2"),
    ],
)
def test_a_file_of_another_format(make_run: Any, name: str, content: str, named: str) -> None:
    path = make_run()
    (path / name).write_text(content, encoding="utf-8")
    with pytest.raises(RecastError, match=named):
        read_run(path)


def test_a_repeated_epoch_counts_once(make_run: Any) -> None:
    path = make_run(epochs=2)
    with (path / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps({"epoch": 1, "val_loss": 1.0, "val_top1": 12.5}) + "\n")
    assert [row.metrics for row in read_run(path).metrics if row.epoch == 1] == [{"top1": 12.5}]


@pytest.mark.parametrize(
    ("name", "data_dir", "title"),
    [("folder", "some/photos", "photos"), ("zip", "some/photos.zip", "photos"), ("torch/mnist", "some/where", "mnist")],
)
def test_the_title_names_the_images(make_run: Any, name: str, data_dir: str, title: str) -> None:
    run = read_run(make_run(recipe={"data.name": name, "data.data_dir": data_dir}))
    assert run.title.partition(",")[0] == f"{run.recipe.model.name} on {title}"
    assert run.recipe.data.title == title
