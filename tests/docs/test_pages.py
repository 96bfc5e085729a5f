"""Every Python block of README.md and docs/ runs, and prints what the page says it prints.

The blocks of a page share one namespace, as in a session. There is no network: `pretrained` is dropped, and large
networks, images and data sets are replaced by small ones. Pages that train for longer run with RECAST_SLOW=1.
docs/papers.md reads run folders: `recipes/test_papers_page.py` runs it.
"""

import contextlib
import csv
import io
import os
import re
from codeop import compile_command
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from PIL import Image
from torch import nn

import recast
from recast.lab.recipes import recipes

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```$)?", flags=re.DOTALL | re.MULTILINE)
PAGES = {
    str(path.relative_to(ROOT)): BLOCK.findall(path.read_text(encoding="utf-8"))
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
}
SLOW = {"docs/start.md", "docs/export.md"}
SMALLER = {
    "224, 224": "64, 64",
    ', checkpoint="s60_224_1k.pth"': ", num_classes=9",
    "patchconvnet_s60": "patchconvnet_s20",
    'DataConfig("imagenet", data_dir="/data/imagenet")': 'DataConfig("digits", num_val=20)',
    '"corruptions", "resolution"': '"fgsm"',
    "steps=20": "steps=2",
    "weights=FasterRCNN_ResNet50_FPN_Weights.DEFAULT": "weights=None, weights_backbone=None, min_size=64",
    "480, 640": "64, 96",
}
NETWORKS = {"resnet50": "resnet10t", "resnet18": "resnet10t"}


@pytest.fixture
def namespace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What a page takes for granted: networks, normalised images, labels, pixels, files."""
    monkeypatch.chdir(tmp_path)
    create = timm.create_model
    monkeypatch.setattr(
        timm, "create_model", lambda name, pretrained=False, **kw: create(NETWORKS.get(name, name), **kw)
    )
    (tmp_path / "names.txt").write_text("".join(f"class {i}\n" for i in range(1000)), encoding="utf-8")
    Image.new("RGB", (80, 64), "orange").save(tmp_path / "cat.jpg")
    parent = create("resnet10t", num_classes=10).eval()
    child = recast.recast_(create("resnet10t", num_classes=10), recast.plan(parent, torch.zeros(1, 3, 64, 64)))
    child.eval()
    images, labels = torch.randn(8, 3, 64, 64), torch.arange(8)
    row: dict[str, Any] = {"torch": torch, "timm": timm, "recast": recast, "MyConv": type("MyConv", (nn.Conv2d,), {})}
    row |= {"parent": parent, "child": child, "model": child, "images": images, "labels": labels}
    row |= {"pixels": images.sigmoid(), "batches": [images], "loader": [(images, labels)], "epochs": 1}
    return row


def test_the_numbers_of_the_readme_are_those_of_the_results() -> None:
    readme, supported = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/supported.md"))
    assert f"[{len(recipes())} recipes]" in readme
    assert f"| {len(recipes())} recipes:" in supported
    results: list[dict[str, str]] = []
    for name in ("beside_differences.csv", "photographs_differences.csv"):
        with (ROOT / "results" / name).open(encoding="utf-8") as file:
            results += csv.DictReader(file)
    arms = [tuple(row[name].removesuffix(", equal seconds") for name in ("ours", "arm")) for row in results]
    lines = [line.replace("−", "-") for line in readme.splitlines() if re.search(r"\| (beside|after)", line)]
    table = [line.strip("| ").split(" | ") for line in lines]
    assert len(table) >= 4
    for *_, ours, arm, difference in table:
        numbers = list(map(float, re.findall(r"-?\d+\.\d", difference)))
        rows = [row for row, pair in zip(results, arms, strict=True) if pair == (ours.removeprefix("| "), arm)]
        assert any(
            [float(row[name]) for name in ("ours_minus_arm", "low_95", "high_95")] == pytest.approx(numbers, abs=0.051)
            for row in rows
        ), arm


def test_the_cost_of_the_default_is_that_of_the_results() -> None:
    """The first table of speed.md: percent more than fine-tuning, beside convolutions and (after the blocks)."""
    lines = [
        line for line in (ROOT / "docs/speed.md").read_text(encoding="utf-8").splitlines() if "**present**" in line
    ]
    shown = [[list(map(int, re.findall(r"\d+(?= %)", cell))) for cell in line.split("|")[3:5]] for line in lines]
    with (ROOT / "results/beside_times.csv").open(encoding="utf-8") as file:
        rows = {(row["task"], row["arm"]): row for row in csv.DictReader(file)}
    with (ROOT / "results/peers.csv").open(encoding="utf-8") as file:
        peers = {tuple(row[name] for name in ("family", "pass", "arm")): row for row in csv.DictReader(file)}
    for family, cells in zip(("resnet50t", "resnet26t"), shown[3:], strict=True):
        for kind, numbers in zip(("training step", "inference"), cells, strict=True):
            arms = "recast", "recast, after the blocks"
            speeds = [float(peers[family, kind, arm]["relative_speed"]) for arm in arms]
            assert numbers == [round(100 / speed - 100) for speed in speeds], (family, kind)
    for task, cells in zip(("odd_digit", "cifar", "odd_photo"), shown[:3], strict=True):
        ours = ("beside, equal seconds" if task == "odd_photo" else "beside", "after the blocks, equal seconds")
        for column, numbers in zip(("step", "inference_batch"), cells, strict=True):
            parent = float(rows[task, "fine-tuned, equal seconds"][column])
            assert numbers == [round(100 * float(rows[task, arm][column]) / parent - 100) for arm in ours], (
                task,
                column,
            )


@pytest.mark.parametrize("page", [page for page, blocks in PAGES.items() if blocks])
def test_every_block_can_be_pasted_into_a_prompt(page: str) -> None:
    """Python 3.11's prompt ends a `with` or `for` at a blank line, and knows no other end."""
    for source, _ in PAGES[page]:
        lines: list[str] = []
        for line in [*source.splitlines(), ""]:
            lines.append(line)
            if compile_command("\n".join(lines)) is not None:
                lines = []
        assert not lines, "incomplete"


@pytest.mark.filterwarnings("ignore:.torch.jit:FutureWarning")
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("page", [page for page, blocks in PAGES.items() if blocks and page != "docs/papers.md"])
def test_every_block_of_a_page_runs(page: str, namespace: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    if page in SLOW and not os.environ.get("RECAST_SLOW"):
        pytest.skip("takes a minute: RECAST_SLOW=1")
    if page == "docs/export.md":
        pytest.importorskip("onnxscript", reason="pip install -e '.[export]'")
    if page == "docs/evaluation.md":  # its data are digits here
        namespace["model"] = None
        monkeypatch.setitem(NETWORKS, "resnet50", "digits_resnet")
    monkeypatch.setenv("COLUMNS", "200")
    if page == "README.md":  # as it stands, with what it prints
        monkeypatch.delitem(NETWORKS, "resnet18")
    for source, expected in PAGES[page]:
        for large, small in SMALLER.items() if page != "README.md" else ():
            source = source.replace(large, small)
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile(source, page, "exec"), namespace)
        if expected and page in {*SLOW, "README.md"}:
            shown = (printed.getvalue(), expected)  # digits after a point differ by a machine
            output, words = (re.sub(r"\d+\.\d+(e-?\d+)?", "0.0", text).split() for text in shown)
            assert output == words
