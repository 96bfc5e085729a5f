"""Hostile files: edited recipes, plans, records and headers; damaged bytes; what is no file at all."""

from __future__ import annotations

import json
import os
import random
import shutil
import socket
import struct
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from hypothesis import strategies as st
from judging import Case, Result
from mutations import Damage, as_json, as_yaml, damages, drawn, edits

NEW = ("new",)
PLAN = "plan digits_resnet --num-classes 10 --img-size 16"
TRAIN = "train tiny.yaml --epochs 0 --out new"
EVALUATE = "evaluate run --suite clean --num-images 10 --device cpu --json"
RESUME = "train --resume half"
EXPLAIN = "explain child.safetensors images/a.png --out new.html --json"
EXPLAIN_RUN = "explain run images/a.png --out new.html --json"
REPORT = "report run --out new.html"
BOMB = "\n".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9) if i else 'x'}]" for i in range(12))
YAMLS = (
    BOMB, "&a [*a]", "model: &a {name: digits_resnet}\ndata: {<<: *a}", "<<: {epochs: 1}", "? [a]\n: b",
    "? {a: b}\n: c",
    "!!python/object/apply:os.system ['echo ran']", "model: !!python/name:canary.net", "!!python/module:canary",
    "model: {name: !!python/object/apply:canary.net []}", "epochs: !!int x", "epochs: !!float 1", "seed: !!binary aaaa",
    "where: !!set {a, b}", "where: !!omap [a: b]", "where: !!pairs [a: b]", "epochs: !!timestamp 2001-01-01",
    "2001-01-01: x",
    "epochs: 1\nepochs: 2", "- a", "'", "\t", "%YAML 9.9\n---\na: b", "a: b\n---\nc: d", "...", "[" * 3000, "{" * 3000,
    "a: " * 500, "- " * 3000 + "x", "\n".join(" " * i + "a:" for i in range(600)), "seed: " + "9" * 5000,
    "seed: 1:30:00",
    "seed: 0b11", "seed: 0o17", "seed: 1_000", "model: {name: digits_resnet}\n" + "#" * 600_000, "\ufeffepochs: 0",
    "model: {name: [digits_resnet]}", "model:\n  name: |\n    digits_resnet\n", "null: 1", "true: 1", "1: 1", "~", "? ",
    "model: {name: digits_resnet}\nwhere: last_stage", "model: {name: digits_resnet}\nwhere: ['re:(.*)*(.*)*x!']",
    "model: {name: digits_resnet}\nwhere: ['re:(((((a+)+)+)+)+)+$']", "model: {name: digits_resnet}\nwhere: [null]",
)  # fmt: skip


def file_cases(scale: int, number: int, world: Path) -> Iterator[Case]:
    """All of this module: `scale` cases of a kind, or a few times as many, drawn from the seed `number`."""
    yield from _recipes(scale, number, world)
    yield from _plans(scale, number, world)
    yield from _records(2 * scale, number, world)
    yield from _headers(scale, number, world)
    yield from _damaged(4 * scale, number, world)
    yield from _resumed(scale, number, world)
    yield from _no_files(2 * scale, number)
    yield from _links(scale, number)


def writes(name: str, content: bytes) -> Callable[[Path], object]:
    """What makes `name` in a folder hold `content`."""

    def write(folder: Path) -> None:
        path = folder / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        path.unlink(missing_ok=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)

    return write


def damages_file(name: str, damage: Damage) -> Callable[[Path], object]:
    def write(folder: Path) -> None:
        writes(name, damage((folder / name).read_bytes()))(folder)

    return write


def _recipes(scale: int, number: int, world: Path) -> Iterator[Case]:
    tiny, whole = (yaml.safe_load((world / name).read_text()) for name in ("tiny.yaml", "run/recipe.yaml"))
    for i, found in enumerate(drawn(edits(tiny | {"where": ["last_stage"]}), scale, number)):
        content = as_yaml(found)
        yield Case("recipes, edited", f"tiny-{i}", TRAIN.split(), writes("tiny.yaml", content))
    for i, found in enumerate(drawn(edits(whole), 2 * scale, number + 1)):
        words = random.Random(i + number).choice(
            ("train run/recipe.yaml --epochs 0 --out new", EVALUATE, REPORT, RESUME)
        )
        name = "half/recipe.yaml" if words == RESUME else "run/recipe.yaml"
        yield Case(
            "recipes, edited", f"whole-{i}", words.split(), writes(name, as_yaml(found)), may_change=_kept(words)
        )
    texts = YAMLS if scale >= len(YAMLS) else random.Random(number).sample(YAMLS, scale)
    for i, text in enumerate(texts):
        words = TRAIN if i % 2 else EVALUATE
        name = "tiny.yaml" if i % 2 else "run/recipe.yaml"
        yield Case(
            "recipes, YAML", str(YAMLS.index(text)), words.split(), writes(name, text.encode()), may_change=_kept(words)
        )


def _kept(words: str) -> tuple[str, ...]:
    """What a command adds to a run before it can know that it will fail."""
    if words.startswith("evaluate"):
        return ("run/scores/*",)
    return ("half/*",) if words == RESUME else ()


def _plans(scale: int, number: int, world: Path) -> Iterator[Case]:
    plan = json.loads((world / "plan.json").read_text())
    for i, found in enumerate(drawn(edits(plan), 2 * scale, number + 2)):
        words = random.Random(i + number).choice(
            (f"{PLAN} --plan plan.json", f"{TRAIN} --plan plan.json", REPORT, RESUME)
        )
        name = {REPORT: "run/plan.json", RESUME: "half/plan.json"}.get(words, "plan.json")
        yield Case("plans, edited", str(i), words.split(), writes(name, as_json(found)), may_change=_kept(words))


def _records(scale: int, number: int, world: Path) -> Iterator[Case]:
    """JSON, JSONL and CSV of a run, each value of another kind: what is damaged is told, the rest is shown."""
    names = (
        "verify.json",
        "environment.json",
        "evaluation.json",
        "classes.json",
        "metrics.jsonl",
        "finetuned/metrics.jsonl",
    )
    for name in names:
        text = (world / "run" / name).read_text()
        lines = [json.loads(line) for line in text.splitlines()] if name.endswith("l") else json.loads(text)
        for i, found in enumerate(drawn(edits(lines), max(1, scale // 4), number + 3)):
            if name.endswith("l"):
                content = b"\n".join(map(as_json, found)) if isinstance(found, list) else as_json(found)
            else:
                content = as_json(found, 1)
            words = random.Random(i + number).choice(
                (REPORT, EVALUATE, REPORT if name != "classes.json" else EXPLAIN_RUN)
            )
            yield Case(
                "records, edited", f"{name}-{i}", words.split(), writes(f"run/{name}", content), may_change=_kept(words)
            )
    cells = st.one_of(
        st.sampled_from(
            ("", "nan", "inf", "-1", "1e300", "x" * 200_000, "\x00", "\x1b[2J", '"', "a,b", "\ud800", "=cmd()")
        )
    )
    for name in ("rows.csv", "differences.csv", "analysis/heads.csv"):
        table = [line.split(",") for line in (world / "run" / name).read_text().splitlines()]
        change = st.tuples(st.integers(0, min(9, len(table) - 1)), st.integers(0, len(table[0])), cells)
        for i, (row, column, cell) in enumerate(drawn(change, max(1, scale // 4), number + 4)):
            other = [list(line) for line in table]
            other[row][column : column + 1] = [cell]
            content = "\n".join(",".join(line) for line in other).encode("utf-8", "surrogatepass")
            words = EVALUATE if i % 2 else REPORT
            yield Case(
                "records, edited", f"{name}-{i}", words.split(), writes(f"run/{name}", content), may_change=_kept(words)
            )


def _headers(scale: int, number: int, world: Path) -> Iterator[Case]:
    """The JSON at the head of a safetensors file, and ours in its metadata."""
    content = (world / "child.safetensors").read_bytes()
    size = struct.unpack("<Q", content[:8])[0]
    header, rest = json.loads(content[8 : 8 + size]), content[8 + size :]

    def packed(found: Any) -> bytes:
        text = as_json(found)
        return struct.pack("<Q", len(text)) + text + rest

    for i, found in enumerate(drawn(edits(header), scale, number + 5)):
        yield _explained("saved files, header", f"tensors-{i}", packed(found))
    ours = json.loads(header["__metadata__"]["recast"])
    ours["plan"] = json.loads(ours["plan"])
    for i, found in enumerate(drawn(edits(ours), scale, number + 6)):
        if isinstance(found, dict) and isinstance(found.get("plan"), dict):
            found["plan"] = as_json(found["plan"]).decode("utf-8", "surrogatepass")
        told = as_json(found).decode("utf-8", "surrogatepass")
        metadata = header["__metadata__"] | {"recast": told}
        if i % 2:  # as by somebody who knows the format: without a checksum
            metadata.pop("checksum", None)
        yield _explained("saved files, header", f"ours-{i}", packed(header | {"__metadata__": metadata}), same=False)
    for i, length in enumerate((0, 1, 7, 2**20, 2**40, 2**63, 2**64 - 1)):
        yield _explained("saved files, header", f"length-{i}", struct.pack("<Q", length) + content[8:])


def _explained(kind: str, name: str, content: bytes, same: bool = True) -> Case:
    return Case(
        kind, name, EXPLAIN.split(), writes("child.safetensors", content), same_as(EXPLAIN) if same else _nothing
    )


def _nothing(result: Result) -> str:
    return ""


BASELINES: dict[str, Callable[[Result], object]] = {}
"""Command → what must be the same where a damaged file was taken for whole; filled by `cases`."""


def same_as(words: str) -> Callable[[Result], str]:
    """Silently wrong: nothing is told, and the result is another one than that of whole files."""

    def wrong(result: Result) -> str:
        expected, found = EXPECTED[words], outcome(words, result)
        return "" if result.told or found == expected else f"other results: {str(found)[:200]}"

    return wrong


EXPECTED: dict[str, object] = {}
"""Command → its outcome with whole files; `baselines` fills it."""


def outcome(words: str, result: Result) -> object:
    """What a command is for, without what differs from call to call."""
    if words == RESUME:
        return {path: digest for path, digest in result.made.items() if path == "half/weights.safetensors"}
    if words == REPORT:
        return {path: digest for path, digest in result.made.items() if path == "new.html"}
    return result.out


BINARY = (
    ("run/weights.safetensors", (EVALUATE, EXPLAIN_RUN)),
    ("run/parent.safetensors", (EVALUATE, EXPLAIN_RUN)),
    ("run/finetuned/weights.safetensors", (EVALUATE,)),
    ("run/checkpoints/epoch-0001.safetensors", (EXPLAIN_RUN,)),
    ("run/scores/clean/*.npz", (EVALUATE,)),
    ("run/attention.npz", (REPORT,)),
    ("child.safetensors", (EXPLAIN,)),
    ("weights.safetensors", (f"{PLAN} --checkpoint weights.safetensors",)),
    ("weights.pth", (f"{PLAN} --checkpoint weights.pth",)),
    ("images/a.png", (EXPLAIN_RUN,)),
)
TEXT = (
    *(
        (f"run/{name}", (EVALUATE, REPORT))
        for name in ("recipe.yaml", "classes.json", "rows.csv", "differences.csv", "evaluation.json")
    ),
    *(
        (f"run/{name}", (REPORT,))
        for name in (
            "plan.json",
            "verify.json",
            "environment.json",
            "metrics.jsonl",
            "finetuned/metrics.jsonl",
            "analysis/heads.csv",
        )
    ),
    ("tiny.yaml", (TRAIN,)),
    ("plan.json", (f"{PLAN} --plan plan.json",)),
    ("canary.py", (EVALUATE,)),
)
RESUMED = (
    "recipe.yaml",
    "plan.json",
    "metrics.jsonl",
    "classes.json",
    "parent.safetensors",
    "environment.json",
    "verify.json",
    "resume/*.pt",
)


def _only(world: Path, pattern: str) -> str:
    return next(str(path.relative_to(world)) for path in sorted(world.glob(pattern)))


def _damaged(scale: int, number: int, world: Path) -> Iterator[Case]:
    for files, kind in ((BINARY, "weights, scores and pictures, damaged"), (TEXT, "texts, damaged")):
        every = [(_only(world, pattern), words) for pattern, commands in files for words in commands]
        for i, damage in enumerate(drawn(damages(), scale, number + 7 + (files is TEXT))):
            name, words = every[i % len(every)]
            # nothing in plain weights and in texts says that they are damaged
            same = files is BINARY and not name.startswith(("weights.", "images/"))
            yield Case(
                kind, f"{name}-{damage!r}-{words.split()[0]}", words.split(), damages_file(name, damage),
                same_as(words) if same else _nothing, may_change=_kept(words),
            )  # fmt: skip


def _resumed(scale: int, number: int, world: Path) -> Iterator[Case]:
    for i, damage in enumerate(drawn(damages(), scale, number + 9)):
        name = _only(world, f"half/{RESUMED[i % len(RESUMED)]}")
        binary = name.endswith((".pt", ".safetensors"))
        yield Case(
            "runs that go on, damaged", f"{name}-{damage!r}", RESUME.split(), damages_file(name, damage),
            same_as(RESUME) if binary else _nothing, may_change=("half/*",),
        )  # fmt: skip


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _socket(path: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # names of sockets are short
    try:
        socket.socket(socket.AF_UNIX).bind(path.name)
    finally:
        os.chdir(here)


def _link(target: str, path: Path) -> None:
    path.symlink_to(path.name if target == "itself" else target)


def _huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(2**36)  # sparse


def _locked(path: Path) -> None:
    path.write_bytes(b"x")
    path.chmod(0)


NO_FILES: dict[str, Callable[[Path], None]] = {
    "a pipe": _fifo,
    "a socket": _socket,
    "a folder": Path.mkdir,
    "64 GiB": _huge,
    "no permission": _locked,
    **{
        f"a link to {target}": partial(_link, target)
        for target in (
            "itself",
            "nowhere",
            "/dev/zero",
            "/dev/stdin",
            "/dev/full",
            "/proc/self/mem",
            "/proc/kmsg",
            "/",
            "..",
        )
    },
}
OTHERS = (
    ("tiny.yaml", TRAIN), ("plan.json", f"{PLAN} --plan plan.json"), ("plan.json", f"{TRAIN} --plan plan.json"),
    ("weights.safetensors", f"{PLAN} --checkpoint weights.safetensors"),
    ("weights.pth", f"{PLAN} --checkpoint weights.pth"),
    ("child.safetensors", EXPLAIN), ("images/a.png", EXPLAIN_RUN), ("images", "explain run images --out new.html"),
    ("names.txt", "explain child.safetensors images/a.png --classes names.txt --out new.html"),
    ("new.html", REPORT), ("new.html", EXPLAIN), ("new", TRAIN),
    ("new", "report run --figures new --out new.html"), ("new.json", f"{PLAN} --out new.json"),
    ("new", "quickstart --out new"), ("new", "train --resume new"), ("new", "report new"), ("new", "evaluate new"),
    ("data.zip", "verify digits_resnet --num-classes 2 --data zip --data-dir data.zip --img-size 16"),
    ("data/val", "verify digits_resnet --num-classes 2 --data folder --data-dir data --img-size 16"),
    ("data/val/a", "verify digits_resnet --num-classes 2 --data folder --data-dir data --img-size 16"),
    ("data/val/a/0.png", "verify digits_resnet --num-classes 2 --data folder --data-dir data --img-size 16"),
    ("shards/_info.json", "verify digits_resnet --num-classes 2 --data wds/x --data-dir shards --img-size 16"),
    ("shards/val-0.tar", "verify digits_resnet --num-classes 2 --data wds/x --data-dir shards --img-size 16"),
    ("run/.lock", RESUME.replace("half", "run")), ("half/.lock", RESUME), ("run/resume", RESUME.replace("half", "run")),
    *((f"half/{name}", RESUME) for name in ("recipe.yaml", "plan.json", "metrics.jsonl", "classes.json",
    "parent.safetensors", "resume", "environment.json", "finetuned", "weights.safetensors")),
    *((f"run/{name}", words) for name in ("recipe.yaml", "weights.safetensors", "parent.safetensors", "classes.json",
    "rows.csv", "evaluation.json", "finetuned", "scores") for words in (EVALUATE, REPORT)),
    *((f"run/{name}", REPORT) for name in ("plan.json", "metrics.jsonl", "verify.json", "attention.npz", "analysis",
    "environment.json")),
    *((f"run/{name}", EXPLAIN_RUN) for name in ("checkpoints", "weights.safetensors", "plan.json")),
    ("run", REPORT), ("run", EVALUATE), ("run", EXPLAIN_RUN),
)  # fmt: skip


def _no_files(scale: int, number: int) -> Iterator[Case]:
    chosen = drawn(st.tuples(st.sampled_from(OTHERS), st.sampled_from(sorted(NO_FILES))), scale, number + 10)
    for i, ((name, words), what) in enumerate(chosen):

        def prepare(folder: Path, name: str = name, what: str = what) -> None:
            path = folder / name
            if path.is_dir():
                shutil.rmtree(path)
            path.unlink(missing_ok=True)
            NO_FILES[what](path)

        yield Case("no files", f"{i}: {name} is {what}", words.split(), prepare, may_change=_kept(words))


def _links(scale: int, number: int) -> Iterator[Case]:
    """Another name of the user's notes lies where a command writes: the notes are never written."""
    places = [("half", name) for name in (".lock", "metrics.jsonl", "environment.json", "weights.safetensors")]
    places += [("run", name) for name in (".lock", "rows.csv", "evaluation.json", "differences.csv", "report.html")]
    chosen = drawn(st.tuples(st.sampled_from(places), st.sampled_from((os.symlink, os.link))), scale, number + 11)
    for i, ((run, name), link) in enumerate(chosen):

        def prepare(folder: Path, run: str = run, name: str = name, link: Callable[..., None] = link) -> None:
            (folder / run / name).unlink(missing_ok=True)
            link(folder / "notes.txt", folder / run / name)

        words = RESUME if run == "half" else REPORT.partition(" --out")[0] if name == "report.html" else EVALUATE
        yield Case("links", f"{i}: {run}/{name} is {link.__name__} of notes.txt", words.split(), prepare,
                   lambda result: "notes.txt was written" * ("notes.txt" in result.changes),
                   may_change=_kept(words))  # fmt: skip
