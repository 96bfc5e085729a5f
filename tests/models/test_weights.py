import argparse
import gzip
import pathlib
import pickle
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from recast.errors import RecastError
from recast.models.weights import load_weights_, read_header, read_weights, select_weights


def net() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8, 4))


class TouchesAFile:
    """Unpickling it creates a file: the proof that code ran."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


WEIGHTS = net().state_dict()
EMA = {name: value + 1 for name, value in WEIGHTS.items()}


def under(prefix: str, weights: dict[str, torch.Tensor] = WEIGHTS) -> dict[str, torch.Tensor]:
    return {prefix + name: value for name, value in weights.items()}


def selected(tmp_path: Path, content: object, key: str | None = None, name: str = "w.pth") -> dict[str, torch.Tensor]:
    torch.save(content, tmp_path / name)
    return select_weights(net(), read_weights(tmp_path / name), name, key)


@pytest.mark.parametrize("name", ["w.ckpt", "w.PTH", "w"])
@pytest.mark.parametrize(
    "content",
    [
        under("model."),
        {"state_dict": under("backbone.")},
        {"model": {"state_dict": under("_orig_mod.module.")}},
        {"model": under("module._orig_mod.")},
        {"state_dict_ema": WEIGHTS, "epoch": 3},
        [WEIGHTS, 3],
        {"module": WEIGHTS},
        {k.replace("0.", "0._orig_mod."): v for k, v in WEIGHTS.items()},
        {
            "state_dict": WEIGHTS,
            "args": argparse.Namespace(lr=0.1, out=pathlib.Path("x")),
            "best": np.float64(0.9),
            "history": [np.arange(2)],
            "place": pathlib.PureWindowsPath("c:/x"),
        },
    ],
    ids=lambda content: ",".join(content)[:40] if isinstance(content, dict) else "list",
)
def test_containers_of_training_frameworks(tmp_path: Path, content: object, name: str) -> None:
    read = selected(tmp_path, content, name=name)
    assert read.keys() == WEIGHTS.keys()
    assert all(torch.equal(read[k], WEIGHTS[k]) for k in WEIGHTS)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"model": under("net.") | {"criterion.weight": torch.ones(4)}}, r"left out model\.criterion\.weight"),
        (under("module.") | {"n_averaged": torch.tensor(3)}, "left out n_averaged"),
        ({"model": WEIGHTS, "optimizer": {"state": {0: {"step": torch.ones(1)}}}}, r"optimizer\.state\.0\.step"),
    ],
)
def test_what_is_left_out_is_said(tmp_path: Path, content: object, message: str) -> None:
    with pytest.warns(UserWarning, match=message):
        assert selected(tmp_path, content).keys() == WEIGHTS.keys()


@pytest.mark.parametrize(
    ("content", "first", "second"),
    [
        ({"state_dict": WEIGHTS, "state_dict_ema": EMA}, "state_dict_ema", "state_dict"),
        ({"model_ema": EMA, "model": WEIGHTS}, "model_ema", "model"),
        ({"model": {"state_dict": WEIGHTS}, "ema": {"module": under("module.", EMA)}}, "ema", "model"),
        ({"state_dict": under("model.") | under("ema_model.", EMA)}, "ema_model", "state_dict.model"),
        ({"best": EMA, "state_dict": WEIGHTS}, "state_dict", "best"),
    ],
)
def test_of_several_sets_the_average_is_taken_and_said(
    tmp_path: Path, content: object, first: str, second: str
) -> None:
    with pytest.warns(UserWarning, match=rf"{first}\S* is loaded, checkpoint_key="):
        taken = selected(tmp_path, content)
    chosen = selected(tmp_path, content, second)
    kinds = {"average" if torch.equal(w["3.bias"], EMA["3.bias"]) else "plain" for w in (taken, chosen)}
    assert kinds == {"average", "plain"}
    with pytest.raises(RecastError, match="no weights under 'nowhere'"):
        selected(tmp_path, content, "nowhere")


@pytest.mark.parametrize("zipped", [True, False])
def test_a_pickle_with_code_is_refused_and_never_run(tmp_path: Path, zipped: bool) -> None:
    marker, path = tmp_path / "ran", tmp_path / "evil.pth"
    content = {"state_dict": net().state_dict(), "args": TouchesAFile(marker)}
    torch.save(content, path, _use_new_zipfile_serialization=zipped)
    with pytest.raises(RecastError, match=r"evil.pth holds code, which is not run") as error:
        read_weights(path)
    assert "\n" not in str(error.value)
    assert not marker.exists()
    torch.load(path, weights_only=False)  # the file is a real threat: the careless reader runs it
    assert marker.exists()


def test_a_checkpoint_that_unpacks_to_gigabytes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recast.reading.LARGEST", 2**16)
    torch.save({"a": torch.zeros(2**16)}, tmp_path / "a.pth")
    assert read_weights(tmp_path / "a.pth")["a"].shape == (2**16,)
    with zipfile.ZipFile(tmp_path / "a.pth") as stored, zipfile.ZipFile(tmp_path / "b.pth", "w", 8) as packed:
        for name in stored.namelist():
            packed.writestr(name, stored.read(name))
    with pytest.raises(RecastError, match=r"cannot read checkpoint .*b.pth: unpacked it is larger"):
        read_weights(tmp_path / "b.pth")


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
@pytest.mark.parametrize("keep", [0, 4, 0.5, 0.99])
def test_truncated_file_is_one_clear_line(tmp_path: Path, suffix: str, keep: float) -> None:
    path = tmp_path / f"cut{suffix}"
    if suffix == ".safetensors":
        save_file(net().state_dict(), path)
    else:
        torch.save(net().state_dict(), path)
    content = path.read_bytes()
    path.write_bytes(content[: keep if isinstance(keep, int) else int(keep * len(content))])
    with pytest.raises(RecastError, match=rf"cut{suffix} is truncated or not a") as error:
        read_weights(path)
    assert "\n" not in str(error.value)


ITSELF: dict[str, Any] = {}
ITSELF |= {"model": ITSELF, "ema": [ITSELF]}
CODE = r"w\.pth holds code, .*: save the weights alone, torch\.save"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (torch.ones(1), "must hold a mapping of names to tensors, got Tensor"),
        ([1, 2], "holds no weights"),
        ({}, "holds no weights"),
        ({"state_dict": {}}, "holds no weights"),
        (ITSELF, "holds no weights"),
        (net(), CODE),
        ({"model": WEIGHTS, "optimizer": torch.optim.SGD(net().parameters())}, CODE),
        ({"student": under("module."), "teacher": EMA}, r"student\.module, teacher: choose with checkpoint_key="),
    ],
)
def test_content_without_a_set_of_weights_is_refused(tmp_path: Path, content: object, message: str) -> None:
    with pytest.raises(RecastError, match=message):
        selected(tmp_path, content)


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "page.pth").write_text("<html>404</html>", encoding="utf-8")
    for path, message in (
        (tmp_path, "is not a file"),
        (tmp_path / "page.pth", "is a web page"),
        ("a" * 5000 + ".pth", "does not exist"),
        ("a\0.pth", "does not exist"),
    ):
        with pytest.raises(RecastError, match=message):
            read_weights(path)


MODEL, IMAGE = net().eval(), torch.ones(1, 3, 3, 3)
ARRAYS = {name: value.numpy() for name, value in WEIGHTS.items()}


def zipped(path: Path, *names: str) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        for name in names:
            archive.writestr(name, "x")


FOREIGN: dict[str, tuple[Callable[[Path], Any], str]] = {
    "pruned.pth": (lambda p: torch.jit.save(torch.jit.trace(MODEL, IMAGE), p), r"TorchScript.*torch\.jit"),
    "net.pt2": (lambda p: torch.export.save(torch.export.export(MODEL, (IMAGE,)), p), r"torch\.export"),
    "old.pt2": (lambda p: zipped(p, "serialized_exported_program.json", "version"), r"torch\.export\.load"),
    "net.package": (lambda p: zipped(p, "net/.data/extern_modules"), r"torch\.package"),
    "net.keras": (lambda p: zipped(p, "config.json", "model.weights.h5"), "Keras"),
    "folder.zip": (lambda p: zipped(p, "a/model.pth"), "zip archive.*unpack"),
    "arrays.npz": (lambda p: np.savez(p, **ARRAYS), r"NumPy arrays.*numpy\.load"),
    "array.npy": (lambda p: np.save(p, ARRAYS["0.weight"]), "single NumPy array"),
    "net.h5": (lambda p: p.write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(100)), "HDF5"),
    "net.onnx": (lambda p: p.write_bytes(b"\x08\x0a\x12\x07pytorch:\x00"), "ONNX"),
    "onnx.pth": (lambda p: p.write_bytes(b"\x08\x08\x12\x07pytorch:\x00"), "ONNX"),
    "net.tflite": (lambda p: p.write_bytes(b"\x1c\0\0\0TFL3" + bytes(20)), "TensorFlow Lite"),
    "net.gguf": (lambda p: p.write_bytes(b"GGUF" + bytes(20)), "GGUF"),
    "net.pth.gz": (lambda p: p.write_bytes(gzip.compress(bytes(99))), "compressed"),
    "net.tar": (lambda p: tarfile.open(p, "w").add(__file__), "tar archive"),
    "lfs.pth": (lambda p: p.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:a"), "git lfs pull"),
    "lfs.safetensors": (lambda p: p.write_text("version https://git-lfs.github.com/spec/v1\noid"), "git lfs pull"),
    "page.pth": (lambda p: p.write_text("\ufeff\n<!DOCTYPE html>…", encoding="utf-8"), "web page"),
    "denied.safetensors": (lambda p: p.write_text('<?xml version="1.0"?><Error>'), "web page"),
    "a.index.json": (lambda p: p.write_text('{"metadata": {}, "weight_map": {}}'), "several files"),
    "note.pth": (lambda p: p.write_text("Entry not found\n"), "text file"),
    "named.pth": (lambda p: save_file(WEIGHTS, p), r"safetensors file.*\.safetensors"),
    "named.safetensors": (lambda p: torch.save(WEIGHTS, p), r"torch\.save.*\.pth"),
    "arrays.pkl": (lambda p: p.write_bytes(pickle.dumps(ARRAYS)), r"a pickle that torch\.save did not write"),
}


@pytest.mark.filterwarnings("ignore:.torch.jit:FutureWarning", "ignore::DeprecationWarning", "ignore::ResourceWarning")
@pytest.mark.parametrize("name", FOREIGN)
def test_files_of_other_formats_are_named(tmp_path: Path, name: str) -> None:
    write, message = FOREIGN[name]
    write(tmp_path / name)
    readers = [read_weights] + [read_header] * name.endswith(".safetensors")
    for read in readers:
        with pytest.raises(RecastError, match=message) as error:
            read(tmp_path / name)
        assert "\n" not in str(error.value)
        assert "truncated" not in str(error.value)


def test_a_pickle_of_another_writer_is_never_run(tmp_path: Path) -> None:
    (tmp_path / "w.pth").write_bytes(pickle.dumps({"0.weight": TouchesAFile(tmp_path / "ran")}))
    with pytest.raises(RecastError, match="is a pickle that"):
        read_weights(tmp_path / "w.pth")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("order", ["<", ">"])
def test_numpy_arrays_are_weights(tmp_path: Path, order: str) -> None:
    arrays = {name: array.astype(array.dtype.newbyteorder(order)) for name, array in ARRAYS.items()}
    read = selected(tmp_path, {"model": arrays | {"classes": np.array(["cat"])}, "history": [np.ones(3)]})
    assert read.keys() == WEIGHTS.keys()
    assert all(torch.equal(read[k], WEIGHTS[k]) and read[k].dtype == WEIGHTS[k].dtype for k in WEIGHTS)


BLOCKS = {f"blocks.{i}.{name}": torch.ones(4) for i in range(5) for name in ("0.weight", "0.bias", "norm.weight")}
STEPS = {"state": {0: {"step": torch.ones(1)}}}


@pytest.mark.parametrize(
    ("content", "first"),
    [
        ({"model": BLOCKS, "epoch": 3}, "blocks.0.0.weight"),
        ({"model": BLOCKS | {"head.weight": torch.ones(4)}, "optimizer": STEPS}, "blocks.0.0.weight"),
        ({"model": BLOCKS, "model_ema": BLOCKS}, "blocks.0.0.weight"),
        ({"student": BLOCKS, "teacher": BLOCKS}, "student.blocks.0.0.weight"),
        ({"model": torch.ones(4), "optimizer": STEPS}, "model"),
        (BLOCKS | {"blocks.4.1.weight": torch.ones(4)}, "blocks.0.0.weight"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*left out")
def test_blocks_of_another_network_are_no_sets_of_weights(tmp_path: Path, content: object, first: str) -> None:
    model = net()
    torch.save(content, tmp_path / "w.pth")
    weights = select_weights(model, read_weights(tmp_path / "w.pth"), "w.pth")
    assert first.removeprefix("blocks.") in {name.removeprefix("blocks.") for name in weights}
    with pytest.raises(RecastError, match="build the network that these weights were saved from"):
        load_weights_(model, weights, "w.pth")


SHAPE = r"first: 0.weight is \(8, 3, 5, 5\), the model's is \(8, 3, 3, 3\)\)$"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"0.weight": None, "3.bias": None}, r"f.pth does not fit Sequential: 2 missing \(first: 0.weight\)"),
        ({"7.weight": torch.ones(1)}, r"1 unexpected \(first: 7.weight\)"),
        ({"0.weight": torch.ones(8, 3, 5, 5)}, SHAPE),
        ({"0.weight": torch.ones(8, 3, 3, 3).to(torch.int8)}, r"1 not floating .* \(first: 0.weight\)"),
        ({"3.weight": torch.full((4, 8), torch.nan)}, "NaN or infinity in 3.weight"),
        ({"1.running_var": torch.full((8,), torch.inf)}, "NaN or infinity in 1.running_var"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_loaded(change: dict[str, Any], message: str) -> None:
    model = net()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    weights = {k: v for k, v in (net().state_dict() | change).items() if v is not None}
    with pytest.raises(RecastError, match=message) as error:
        load_weights_(model, weights, source="f.pth")
    assert "\n" not in str(error.value)
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())


@pytest.mark.parametrize(("mode", "message"), [(False, "mask is an expanded tensor.*clone"), (True, "inference_mode")])
def test_tensors_that_cannot_change_are_named_before_anything_is_loaded(mode: bool, message: str) -> None:
    model = net()
    with torch.inference_mode(mode):
        model.register_buffer("mask", torch.ones(2).clone() if mode else torch.ones(1).expand(2))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(RecastError, match=message):
        load_weights_(model, {name: value + 1 for name, value in before.items()}, source="f.pth")
    assert all(value.equal(before[name]) for name, value in model.state_dict().items())


def test_fp16_old_batchnorm_files_and_masks_of_minus_infinity_load() -> None:
    model, weights = net(), net().state_dict()
    old = {k: v.half() for k, v in weights.items() if not k.endswith("num_batches_tracked")}
    load_weights_(model, old, source="old.pth")
    assert model[0].weight.dtype is torch.float32
    assert torch.equal(model[0].weight, weights["0.weight"].half().float())
    masked = nn.Module()
    masked.register_buffer("mask", torch.full((2, 2), -torch.inf))
    load_weights_(masked, {"mask": torch.full((2, 2), -torch.inf)}, source="f.pth")
