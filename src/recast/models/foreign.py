"""What a file is whose weights are not read, from its first bytes and, in a zip, its names; nothing in it is run."""

from __future__ import annotations

import pickle
import zipfile
from contextlib import suppress
from pathlib import Path

from torch.serialization import MAGIC_NUMBER

SAVE = "if you trust it, save its weights in Python, torch.save({}, 'weights.pth')"
ORIGINAL = "pass the checkpoint that it was made from"
ARRAYS = SAVE.format("{{name: torch.from_numpy(array) for name, array in {}.items()}}")
MAGIC: tuple[tuple[tuple[bytes, ...], str], ...] = (
    ((b"version https://git-lfs",), "is a Git LFS pointer, not the file it stands for: fetch that, git lfs pull"),
    ((b"\x89HDF\r\n\x1a\n",), "is an HDF5 file, as Keras saves: pass a checkpoint of PyTorch"),
    ((b"\x93NUMPY",), "is a single NumPy array without names: pass a checkpoint of PyTorch"),
    ((b"GGUF",), f"is a GGUF file: {ORIGINAL}"),
    ((b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"(\xb5/\xfd", b"7z\xbc\xaf", b"Rar!"), "is a compressed file: unpack it"),
)
"""First bytes, and what they say."""
IN_ZIP = (
    ("constants.pkl", f"is a TorchScript archive: {SAVE.format('torch.jit.load(FILE).state_dict()')}"),
    *(
        (name, f"is a program of torch.export: {SAVE.format('torch.export.load(FILE).state_dict')}")
        for name in ("archive_format", "serialized_exported_program.json")
    ),
    ("extern_modules", f"is a package of torch.package: {ORIGINAL}"),
    ("model.weights.h5", "is a Keras model: pass a checkpoint of PyTorch"),
)
"""Files by which archives are known; TorchScript's has the `data.pkl` of torch.save too."""


def foreign(path: Path) -> str:
    """Return what a file of another format is and what to do, as in "… is an HDF5 file: …"; "" if it is not known."""
    try:
        with open(path, "rb") as file:
            head = file.read(4096)
    except OSError:
        return ""
    is_safetensors = path.suffix.lower() == ".safetensors"
    if head.startswith(b"PK") and zipfile.is_zipfile(path):
        with suppress(Exception), zipfile.ZipFile(path) as archive:  # a damaged list of files breaks it in any way
            return _in_zip(archive.namelist(), is_safetensors)
    for starts, message in MAGIC:
        if head.startswith(starts):
            return message
    if head[:1] == pickle.PROTO and MAGIC_NUMBER.to_bytes(10, "little") not in head[:64]:
        return f"is a pickle that torch.save did not write: {SAVE.format('pickle.load(FILE)')}"
    if head[257:262] == b"ustar":
        return "is a tar archive: unpack it, and pass the checkpoint in it"
    if head[4:8] == b"TFL3":
        return f"is a TensorFlow Lite model: {ORIGINAL}"
    # ONNX is a protobuf without a mark: its version, a small number, and then another field of text
    if path.suffix.lower() == ".onnx" or (head[:1] == b"\x08" and head[1:2] < b"\x20" and head[2:3] in (b"\x12", b":")):
        return f"is an ONNX model, where weights lose their names: {ORIGINAL}"
    if not is_safetensors and head[8:9] == b"{" and 0 < int.from_bytes(head[:8], "little") < 10**8:
        return "is a safetensors file: give it a name that ends in .safetensors"
    return _text(head)


def _in_zip(names: list[str], is_safetensors: bool) -> str:
    files = {name.rpartition("/")[2] for name in names}
    if known := next((message for name, message in IN_ZIP if name in files), ""):
        return known
    if "data.pkl" in files:
        return "is a file of torch.save: give it a name that ends in .pth" if is_safetensors else ""
    if files and all(name.endswith(".npy") for name in files):
        return f"holds NumPy arrays: {ARRAYS.format('numpy.load(FILE)')}"
    return "is a zip archive, not one of torch.save: unpack it, and pass the checkpoint in it"


def _text(head: bytes) -> str:
    text = head.decode("utf-8", "ignore").removeprefix("\ufeff").strip()
    if text.lower().startswith(("<!doctype", "<html", "<?xml")):
        return "is a web page, as of a download that failed: open its address in a browser, download the file itself"
    if '"weight_map"' in text:
        return "is the index of weights in several files: join those in one, and pass that"
    if text and head.isascii() and all(line.isprintable() for line in text.expandtabs().splitlines()):
        return "is a text file: pass the file that holds the weights"
    return ""
