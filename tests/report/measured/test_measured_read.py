"""Files of the evaluation that are cut off or of another format are named."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest

from recast.errors import RecastError
from recast.report.read.run import read_run

MakeRun = Callable[..., Path]


def test_reads_what_was_written(make_measured: MakeRun) -> None:
    run = read_run(make_measured())
    assert run.difference("recast", "finetuned", "clean", "top1") is not None
    assert run.difference("recast", "nobody", "clean", "top1") is None
    assert run.row("parent", "imagenet-c", "mce") is not None
    assert [made.suite for made in run.made][:2] == ["clean", "fgsm"]
    assert len(run.analysis.fourier) == 3 * 9 * 9
    head = run.analysis.heads[0]
    assert (head.epoch, head.tap, head.is_convolution) == (0, (0, 0), True)
    assert math.isnan(head.span)
    assert run.analysis.cka[0].cka == 1.0
    assert set(run.analysis.agreement[0].arms) == {"parent", "finetuned", "recast"}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("analysis/fourier.csv", "model,block\nparent,a\n", r"fourier\.csv lacks the column index, depth"),
        (
            "analysis/cka.csv",
            "model_a,layer_a,model_b,layer_b,cka,n\na,b,c,d,0.5\n",
            r"cka\.csv line 2: expected 6 cells",
        ),
        ("analysis/cka.csv", "model_a,layer_a,model_b,layer_b,cka,n\na,b,c,d,high,1\n", r"cka\.csv line 2: could not"),
        ("analysis/agreement.csv", "index,image,label\nx,a,b\n", r"agreement\.csv line 2: invalid literal"),
        ("differences.csv", "run,model\n", r"differences\.csv must start with"),
        ("evaluation.json", '{"suites": {"clean"', r"evaluation\.json is truncated or not JSON"),
        ("evaluation.json", '{"suites": []}', r"suites of .*evaluation\.json must be a JSON object, got list"),
        ("evaluation.json", "{}", "lacks suites"),
    ],
)
def test_another_format(make_measured: MakeRun, name: str, content: str, message: str) -> None:
    path = make_measured()
    (path / name).write_text(content, encoding="utf-8")
    with pytest.raises(RecastError, match=message):
        read_run(path)
