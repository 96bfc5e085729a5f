import copy
import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from timm.layers import Conv2dSame
from torch import Tensor, nn

import recast
from recast import RecastError, exporting
from recast.lab.cli import main
from recast.papers.dense.detect.networks import SceneRCNN

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's exporter, of its own code


class Small(nn.Module):
    """Two convolutions; images of one size only if `size` is given."""

    def __init__(self, size: int | None = None) -> None:
        super().__init__()
        self.size, self.first, self.second = size, nn.Conv2d(3, 4, 3, 2, 1), nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        if self.size is not None and x.shape[-1] != self.size:
            raise ValueError("another size")
        return self.second(self.first(x).relu()).mean((2, 3))


def recast_small(size: int | None = None) -> tuple[Any, Tensor]:
    """A network with two open heads, and an image."""
    child, x = Small(size).eval(), torch.randn(1, 3, 10, 12)
    recast.recast_(child, recast.plan(child, x, where="second"))
    with torch.no_grad():
        child.second.gamma[:2] = 0.5
        child.second.key.normal_()
    return child, x


def need_onnx() -> None:
    for name in exporting.PACKAGES:
        pytest.importorskip(name, reason="the extra export is not installed")


def test_a_program_of_any_size_is_written_and_checked(tmp_path: Path) -> None:
    child, x = recast_small()
    child.train()
    exported = recast.export(child, x, tmp_path / "child.pt2")
    assert child.training
    assert (exported.to, exported.any_size) == ("torch", True)
    sizes = [(check.batch, check.height, check.width) for check in exported.checks]
    assert sizes == [(1, 10, 12), (3, 10, 12), (1, 42, 76), (3, 42, 76)]
    assert max(check.error for check in exported.checks) < 1e-5
    images = torch.randn(5, 3, 17, 9)
    torch.testing.assert_close(torch.export.load(exported.path).module()(images), child.eval()(images))
    assert "any height and width" in str(exported)


def test_sizes_that_torch_follows_slowly_are_those_of_the_example(tmp_path: Path) -> None:
    for count in (2, 3):  # a .pt2 cannot hold the free sizes of either
        model = nn.Sequential(*(Conv2dSame(3, 3, 3, stride=2) for _ in range(count)))
        exported = recast.export(model, torch.randn(1, 3, 64, 64), tmp_path / "model.pt2")
        assert not exported.any_size
        assert ("3 strided convolutions pad by the size" in str(exported)) == (count == 3)
    plain, images = nn.Conv2d(3, 3, 3), torch.randn(1, 3, 64, 64)
    for any_size in (True, False):
        assert recast.export(plain, images, tmp_path / "model.pt2", any_size=any_size).any_size == any_size


def test_a_file_that_parts_from_the_module_is_an_error_and_not_left(tmp_path: Path, monkeypatch: Any) -> None:
    child, x = recast_small(12)
    write = exporting._write

    def wrong(model: nn.Module, *rest: Any) -> None:
        changed: Any = copy.deepcopy(model)
        changed.second.weight.data.mul_(1.01)
        write(changed, *rest)

    monkeypatch.setattr(exporting, "_write", wrong)
    with pytest.raises(RecastError, match=r"output 0 by .* on 1 images of 10×12; the tolerance is 0.0001"):
        recast.export(child, x, tmp_path / "child.pt2")
    assert not list(tmp_path.iterdir())


def test_a_file_of_another_dtype_may_part_by_its_rounding(tmp_path: Path) -> None:
    child, x = recast_small()
    with torch.no_grad():
        for dtype, error, allowed in ((torch.float32, 3e-4, 0), (torch.float16, 3e-4, 1), (torch.float16, 3e-2, 0)):
            model, x = copy.deepcopy(child).to(dtype), x.to(dtype)
            file = [(1 + error) * model(x)]
            with nullcontext() if allowed else pytest.raises(RecastError, match="differs"):
                exporting.compare(model, lambda _, file=file: file, x)
    need_onnx()
    with pytest.raises(RecastError, match="ONNX Runtime cannot run"):
        recast.export(child.double(), x.double(), tmp_path / "child.onnx")
    assert not list(tmp_path.iterdir())


class Boxes(nn.Module):
    def forward(self, images: list[Tensor]) -> list[dict[str, Tensor]]:
        return [{"boxes": image.mean((1, 2))[None]} for image in images]


def test_what_cannot_be_exported_is_said_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    child, x = recast_small()
    with pytest.raises(RecastError, match=r"\.onnx or \.pt2, got child\.pth"):
        recast.export(child, x, tmp_path / "child.pth")
    for example in (x[0], x[:0]):
        with pytest.raises(RecastError, match="image"):
            recast.export(child, example, tmp_path / "child.pt2")
    for example in ([x[0]], ([x[0], x[0, :, 1:]],)):
        with pytest.raises(RecastError, match="export its backbone"):
            recast.export(Boxes(), example, tmp_path / "child.pt2")
    with pytest.raises(RecastError, match="the folder of path does not exist"):
        recast.export(child, x, tmp_path / "no/child.pt2")
    monkeypatch.setattr(exporting, "find_spec", lambda name: None if name == "onnxruntime" else name)
    with pytest.raises(RecastError, match=r"onnxruntime: pip install 'recast-vision\[export\]'"):
        recast.export(child, x, tmp_path / "child.onnx")


class Factors(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.linalg.qr(x.flatten(2))[1]


def test_what_onnx_cannot_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need_onnx()
    child, x = recast_small()
    weights = sum(t.numel() * t.element_size() for t in child.parameters())
    for most, writes in ((weights - 1, False), (weights, True)):  # before the work by the weights, then by the file
        with monkeypatch.context() as patch:
            patch.setattr(exporting, "MOST_ONNX", most)
            if not writes:
                patch.delattr(exporting, "_write_compared")
            with pytest.raises(RecastError, match=r"GiB, one \.onnx file holds 2: write a \.pt2"):
                recast.export(child, x, tmp_path / "child.onnx")
    monkeypatch.setattr(exporting, "MOST_ONNX", 0)
    assert recast.export(child, x, tmp_path / "child.pt2").path.exists()
    monkeypatch.undo()
    with pytest.raises(RecastError, match=r"ONNX cannot hold Factors: .*linalg_qr"):
        recast.export(Factors(), x, tmp_path / "factors.onnx")
    assert [path.name for path in tmp_path.iterdir()] == ["child.pt2"]


class Pyramid(nn.Module):
    """Pools to four cells, for which torch's ONNX exporter writes the window of the example's size."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.adaptive_avg_pool2d(self.first(x), 2).flatten(1)


@pytest.mark.filterwarnings("ignore")
def test_a_file_that_is_right_at_one_size_only_is_of_that_size(tmp_path: Path) -> None:
    need_onnx()
    child, x = Pyramid().eval(), torch.randn(1, 3, 16, 16)
    recast.recast_(child, recast.plan(child, x, where="first"))
    exported = recast.export(child, x, tmp_path / "child.onnx")
    assert not exported.any_size
    assert "images of this size only" in str(exported)
    free = torch.export.Dim.DYNAMIC  # the first snippet of docs/export.md: nothing notices
    sizes, path = ({0: free, 2: free, 3: free},), tmp_path / "free.onnx"
    torch.onnx.export(child, (x.repeat(2, 1, 1, 1),), path, dynamo=True, dynamic_shapes=sizes, verbose=False)
    wide = torch.randn(2, 3, 16, 23)
    with torch.no_grad(), pytest.raises(RecastError, match="differs from the module"):
        exporting.compare(child, exporting.open_program(path, "onnx"), wide)


@pytest.mark.filterwarnings("ignore")
def test_a_size_that_the_file_does_not_take_prints_no_error(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    need_onnx()
    child, x = nn.Sequential(nn.Conv2d(3, 8, 3, 4, 1), nn.Flatten(2), nn.AdaptiveAvgPool1d(1)), torch.randn(1, 3, 4, 6)
    recast.recast_(child.eval(), recast.plan(child, x, where="all"))
    assert not recast.export(child, x, tmp_path / "child.onnx").any_size
    assert capfd.readouterr().err == ""


class Positive(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[:, 0][x[:, 0] > 0] if x[:, 0].max() > 0 else x[:, 0]


def test_what_finds_as_many_as_there_are(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model, images = SceneRCNN(3, width=16).eval(), torch.rand(1, 3, 64, 64)
    with pytest.raises(RecastError, match=r"SceneRCNN .* boxes.*recast.export.model.backbone"):
        recast.export(model, images, tmp_path / "whole.pt2")
    assert max(check.error for check in recast.export(model.backbone, images, tmp_path / "eyes.pt2").checks) < 1e-5
    with pytest.raises(RecastError, match=r"torch cannot export Positive: "):
        recast.export(Positive(), images, tmp_path / "some.pt2")
    assert capfd.readouterr() == ("", "")
    assert [path.name for path in tmp_path.iterdir()] == ["eyes.pt2"]


def test_the_command_exports_a_folded_network_to_onnx(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    need_onnx()
    parent = timm.create_model("digits_resnet").eval()
    child = recast.recast_(parent, recast.plan(parent, torch.zeros(1, 3, 16, 16)))
    path = recast.save(child, tmp_path / "child.safetensors", "digits_resnet")
    assert main(["export", str(path), "--img-size", "16", "--json"]) == 0
    exported = json.loads(capfd.readouterr().out)
    assert (exported["path"], exported["any_size"]) == (str(tmp_path / "model.onnx"), True)
    import onnx

    graph = onnx.load(exported["path"]).graph
    assert "Softmax" not in {node.op_type for node in graph.node}  # all heads were closed
    shapes = [[d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim] for v in (*graph.input, *graph.output)]
    assert shapes == [["batch", 3, "height", "width"], ["batch", 10]]


def test_the_command_replaces_its_own_files_alone(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = recast.save(Small(), tmp_path / "child.safetensors", f"{__name__}:Small")
    words = ["export", str(path), "--out", str(tmp_path / "model.pt2"), "--img-size", "16", "--trust"]
    for _ in range(2):
        assert main(words) == 0
    (tmp_path / "model.pt2").write_text("MINE")
    assert main(words) == 2
    assert "was not written by recast export" in capfd.readouterr().err
    assert {name.read_text() for name in tmp_path.glob("*.pt2")} == {"MINE"}
