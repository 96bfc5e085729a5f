"""Hostile command lines, streams, environments, disks that are full, and modules of the user's."""

from __future__ import annotations

import itertools
import os
import random
import resource
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from judging import Case, Result
from mutations import NUMBERS, TEXTS, drawn
from of_files import EVALUATE, EXPLAIN, EXPLAIN_RUN, PLAN, REPORT, RESUME, TRAIN, _kept

BASES = {
    "plan": "plan digits_resnet --num-classes 10 --img-size 16",
    "verify": "verify digits_resnet --num-classes 10 --img-size 16 --num-images 2",
    "train": "train tiny.yaml --epochs 0 --out new",
    "evaluate": "evaluate run --suite clean --num-images 10 --device cpu",
    "explain": "explain run images/a.png --out new.html",
    "fold": "fold run --out new.safetensors",
    "report": "report run --out new.html",
    # what is right takes minutes: something is always wrong
    "quickstart": "quickstart --out notes.txt",
}
LONGER = {"--epochs", "--conv-epochs", "--num-train", "--workers", "--timeout", "--num-images", "--trackers"}
"""Options that may ask for work that takes its time: no large numbers for them."""
SUITES = ("clean", "fgsm", "pgd", "basic", "corruptions", "imagenet-c", "imagenet-a", "resolution", "frequency", "knn",
          "agreement", "heads", "fourier", "cka", "cost", "", "CLEAN", "clean,clean", "clean,,fgsm")  # fmt: skip


def command_cases(scale: int, number: int, world: Path) -> Iterator[Case]:
    """All of this module, `scale` cases of a kind."""
    yield from _options(3 * scale, number)
    yield from _words(scale, number)
    yield from _streams(scale, number)
    yield from _full_disks(scale, number)
    yield from _modules(scale, number)
    yield from _named_code(scale, number, world)


def _asked() -> dict[str, list[str]]:
    """Command → its options, as the help has them."""

    from recast.lab.cli.evaluate import EvaluateOptions
    from recast.lab.cli.explain import Options
    from recast.lab.cli.fold import Options as FoldOptions
    from recast.lab.cli.options import options_of
    from recast.lab.cli.plan import PlanOptions
    from recast.lab.cli.quickstart import QuickstartOptions
    from recast.lab.cli.report import ReportOptions
    from recast.lab.cli.train import TrainOptions
    from recast.lab.cli.verify import VerifyOptions

    kinds: dict[str, Callable[[], Any]] = {
        "plan": PlanOptions, "verify": VerifyOptions, "train": TrainOptions, "evaluate": EvaluateOptions,
        "explain": Options, "fold": FoldOptions, "report": ReportOptions,
        "quickstart": QuickstartOptions,
    }  # fmt: skip
    return {  # but for --serve, which does not end by itself
        name: [option.shown for option in options_of(kind()) if not (option.words or option.shown == "--serve")]
        + [f"--{option.dotted}" for option in options_of(kind()) if "." in option.dotted]
        for name, kind in kinds.items()
    }


def _options(scale: int, number: int) -> Iterator[Case]:
    """Every option with values that it does not expect, one or two at a time."""
    asked = _asked()
    chance = random.Random(number)
    pairs = [(name, option) for name, options in asked.items() for option in options if option != "--json"]
    pairs.remove(("quickstart", "--out"))  # with the name of a new folder it is right
    # not the same few each time: hypothesis draws what stands first again and again
    values = st.one_of(
        st.sampled_from(TEXTS), st.sampled_from(NUMBERS).map(str), st.sampled_from(SUITES),
        st.sampled_from(("[" * 3000, "9" * 5000, "canary:net", "1 2 3 4", "null", "a b c")), st.text(max_size=10),
        st.integers().map(str),
        st.floats().map(str),
    )  # fmt: skip
    for i, value in enumerate(drawn(values, scale, number + 20)):
        name, option = chance.choice(pairs)
        value = value.replace("\x00", "0") if chance.random() < 0.9 else value
        if option in LONGER and value.strip("+-").isdigit():
            value = str(min(int(value), 3)) if len(value) < 9 and int(value) > 0 else value
            if len(value) >= 2 and not value.startswith("-"):
                value = "-3"
        words = [*BASES[name].split(), *([f"{option}={value}"] if i % 2 else [option, *value.split(" ")])]
        if i % 3 == 0 and option not in ("--out", "--resume"):
            words.append("--json")
        codes = (0, 1, 2) if name == "verify" else (0, 2)
        yield Case(
            "command lines, values", f"{i}", words, codes=codes, may_change=(*_kept(BASES[name]), "new/*", "new")
        )


def _words(scale: int, number: int) -> Iterator[Case]:
    """Words in any order: other commands' options, things of another kind, options without values."""
    asked = _asked()
    things = (
        "run", "half", "empty", "notes.txt", "images", "images/a.png", "data", "data.zip", "tiny.yaml", "plan.json",
        "child.safetensors", "weights.pth", "digits_resnet", "resnet1", "torchvision:x", "-", "--", "---", "=", "-x",
        "--x",
        "--x=y", "val:0", "val:-1", "val:99999999999", "val:x", "*", "nowhere", "/", "/proc", "/dev/zero", "",
        "\udcff", "é",
    )  # fmt: skip
    words = st.one_of(
        st.sampled_from(things),
        st.sampled_from(sorted({o for options in asked.values() for o in options})),
        st.text(max_size=8),
    )
    line = st.tuples(
        st.sampled_from((*asked, *asked, "", "help", "--help", "--version", "trian", "\x1b[2J")),
        st.lists(words, max_size=5),
    )
    for i, (name, rest) in enumerate(drawn(line, scale, number + 21)):
        fixed = [word.replace("\x00", "0") for word in rest]
        if name == "quickstart":
            fixed += ["--out", "notes.txt"]
        if name == "zoo":
            fixed = ["timm:digits_resnet", "--out", "new.csv", *fixed]
        if name == "train":
            fixed += ["--epochs", "0"]
        may = ("new*", "runs", "runs/*", "run/*", "half/*")
        yield Case(
            "command lines, words",
            str(i),
            [name, *fixed],
            codes=(0, 1, 2),
            may_change=may if name in ("train", "evaluate") else (),
        )


def _close(*numbers: int) -> None:
    import sys

    for number in numbers:
        os.close(number)
        name = ("stdin", "stdout", "stderr")[number]
        setattr(sys, name, None)
        setattr(sys, f"__{name}__", None)


def _device(path: str, number: int) -> None:
    file = os.open(path, os.O_WRONLY)
    os.dup2(file, number)


def _no_reader(number: int) -> None:
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    reading, writing = os.pipe()
    os.close(reading)
    os.dup2(writing, number)


def _variables(**values: str) -> None:
    os.environ.update(values)


def _gone() -> None:
    import shutil

    here = Path.cwd() / "gone"
    here.mkdir()
    os.chdir(here)
    shutil.rmtree(here)


BEFORE: dict[str, Callable[[], object]] = {
    **{f"closed {numbers}": partial(_close, *numbers) for numbers in ((0,), (1,), (2,), (1, 2), (0, 1, 2))},
    "stdout full": partial(_device, "/dev/full", 1),
    "stderr full": partial(_device, "/dev/full", 2),
    "no reader": partial(_no_reader, 1),
    "no reader of errors": partial(_no_reader, 2),
    "the folder was deleted": _gone,
    **{
        f"{name}={value[:20]}": partial(_variables, **{name: value})
        for name, value in (
            ("RANK", "x"), ("RANK", "0"), ("WORLD_SIZE", "x"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "-1"),
            ("RECAST_DATA", "/dev/zero"),
            ("RECAST_DATA", "\x1b[2J"), ("COLUMNS", "0"), ("COLUMNS", "x"), ("COLUMNS", "99999999"), ("LC_ALL", "C"),
            ("LANG", "xx"),
            ("HOME", ""), ("TMPDIR", "/nonexistent"), ("OMP_NUM_THREADS", "x"), ("TERM", "\x1b"),
            ("PYTHONPATH", "/dev/zero"),
            ("XDG_CACHE_HOME", "/dev/null"), ("MPLBACKEND", "nonsense"), ("CUDA_VISIBLE_DEVICES", "x"),
            ("FORCE_COLOR", "1"),
            ("NO_COLOR", "x"), ("TZ", "nowhere"), ("MPLCONFIGDIR", "/dev/null"),
        )
    },
}  # fmt: skip


def _streams(scale: int, number: int) -> Iterator[Case]:
    """Every command where it is not heard, has no folder, or under variables that make no sense."""
    lines = ("--help", *BASES.values(), f"{PLAN} --json", EVALUATE, EXPLAIN)
    pairs = [(words, name) for words in lines for name in BEFORE]
    for words, name in random.Random(number).sample(pairs, min(scale, len(pairs))):
        unheard = "err" in name or (name.startswith("closed") and "2" in name)
        # where only its answer could not be printed, what it was asked to write is written
        written = [word for before, word in itertools.pairwise(words.split()) if before == "--out"]
        yield Case(
            "streams and environments", f"{words}: {name}", words.split(), before=BEFORE[name], codes=(0, 1, 2),
            may_change=("gone", *_kept(words), *written), unheard=unheard,
        )  # fmt: skip


def _small_disk(size: int) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def _full_disks(scale: int, number: int) -> Iterator[Case]:
    """No file may grow beyond a size: what was there stays whole, and nothing half-written is left."""
    chance = random.Random(number + 22)
    for i in range(scale):
        words = chance.choice(
            (
                TRAIN,
                RESUME,
                EVALUATE + " --again",
                EXPLAIN,
                REPORT,
                f"{PLAN} --out new.json",
            )
        )
        # below it is what Python itself writes of a command
        size = chance.choice((1, 100, 1000, 5000, 20_000, 100_000, 600_000, 700_000, 1_500_000))
        may = ("half/*", "new", "new/*") if words.startswith("train") else ("new.csv", *_kept(words))
        yield Case(
            "full disks", f"{i}: {size}", words.split(), before=partial(_small_disk, size), may_change=may,
            codes=(0, 1, 2),
            unheard=True,
        )  # fmt: skip


MODULES = {
    "prints": "print('hello')\ndef net():\n    print('hello')\n    return N()",
    "prints to the file": "import os\nos.write(1, b'hi\\n')\ndef net():\n    os.write(1, b'hi\\n')\n    return N()",
    "raises at import": "raise ValueError('a\\nb\\x1b[2J' + 'x' * 9000)",
    "exits at import": "import sys\nsys.exit(7)",
    "interrupts at import": "raise KeyboardInterrupt",
    "stops at import": "raise GeneratorExit",
    "syntax": "def net(:",
    "tabs": "if 1:\n\tx\n        y",
    "null": "x = '\\0'\0",
    "not text": "# \xff\ndef net(): return N()",
    "recursive": "def net():\n    return net()",
    "deep": "x = " + "(" * 500 + ")" * 500,
    "no memory": "def net():\n    return bytearray(10**15)",
    "empty": "",
    "no network": "def net():\n    return 3",
    "a class": "class net: pass",
    "a lambda": "net = lambda: N()",
    "a value": "net = 3",
    "arguments": "def net(a, b):\n    return N()",
    "raises": "def net():\n    raise RuntimeError('bad')",
    "exits": "def net():\n    import sys; sys.exit('bye')",
    "really exits": "def net():\n    raise SystemExit(0)",
    "bad string": "class E(Exception):\n    def __str__(self): raise ValueError('no')\ndef net():\n    raise E()",
    "bad repr": "class M(type(N())):\n    def __repr__(self): raise ValueError('no')\ndef net():\n    return M()",
    "forward raises": "class M(type(N())):\n    def forward(self, x): raise KeyError('no')\ndef net():\n    return M()",
    "forward exits": "class M(type(N())):\n    def forward(self, x): raise SystemExit(3)\ndef net():\n    return M()",
    "forward of text": "class M(type(N())):\n    def forward(self, x): return 'text'\ndef net():\n    return M()",
    "forward of nan": "class M(type(N())):\n"
    "    def forward(self, x): return super().forward(x) * float('nan')\ndef net():\n    return M()",
    "forward of nothing": "class M(type(N())):\n    def forward(self, x): return None\ndef net():\n    return M()",
    "weights of nan": "def net():\n    m = N()\n    m.conv1.weight.data.fill_(float('nan'))\n    return m",
    "no weights": "import torch\ndef net():\n    return torch.nn.Identity()",
    "no convolution": "from torch import nn\ndef net():\n    return nn.Sequential(nn.Flatten(), nn.Linear(768, 10))",
    "on meta": "def net():\n    return N().to('meta')",
    "doubles": "def net():\n    return N().double()",
    "scripted": "import torch\ndef net():\n    return torch.jit.trace(N().eval(), torch.zeros(1, 3, 16, 16))",
    "a generator": "def net():\n    yield N()",
    "a coroutine": "async def net():\n    return N()",
    "changes the folder": "import os\nos.chdir('/')\ndef net():\n    return N()",
    "closes stdout": "import sys\nsys.stdout.close()\ndef net():\n    return N()",
    "replaces stdout": "import sys\nsys.stdout = None\ndef net():\n    return N()",
    "warns": "import warnings\ndef net():\n    warnings.warn('a\\nb')\n    return N()",
    "warns as an error": "import warnings\nwarnings.simplefilter('error')\ndef net():\n    return N()",
    "seeds": "import torch\ntorch.manual_seed(7)\ndef net():\n    return N()",
    "half": "import torch\ntorch.set_default_dtype(torch.float64)\ndef net():\n    return N()",
    "no gradient": "import torch\ntorch.set_grad_enabled(False)\ndef net():\n    return N()",
    "shadows": "import sys\nsys.modules['torch'] = None\ndef net():\n    return N()",
}  # fmt: skip
HEAD = "from timm import create_model\ndef N(): return create_model('digits_resnet', num_classes=10)\n"


def _modules(scale: int, number: int) -> Iterator[Case]:
    """A module that the user named, whatever it does."""
    lines = (
        "plan own:net --img-size 16 --json", "verify own:net --img-size 16 --num-images 2 --json",
        "train tiny.yaml --model own:net --epochs 0 --out new",
        "explain own:net images/a.png --out new.html --json --img-size 16",
    )  # fmt: skip
    pairs = [(name, words) for name in MODULES for words in lines]
    for name, words in random.Random(number + 23).sample(pairs, min(scale, len(pairs))):

        def prepare(folder: Path, name: str = name) -> None:
            head = "" if "import" in name or name in ("syntax", "empty", "deep", "null") else HEAD
            (folder / "own.py").write_bytes((head + MODULES[name]).encode("latin-1"))

        codes = (0, 1, 2, 130) if "interrupts" in name else (0, 1, 2)
        # what is in __pycache__ is Python's own
        yield Case(
            "modules of the user's",
            f"{name}: {words.split()[0]}",
            words.split(),
            prepare,
            _only_json if "--json" in words else lambda _: "",
            codes=codes,
            may_change=("__pycache__*",),
            unheard=name.startswith("prints"),  # beside the line of the command
        )


def _only_json(result: Result) -> str:
    import json

    try:
        json.loads(result.out)
    except ValueError:
        return f"no JSON: {result.out[:100]!r}" if result.code == 0 else ""
    return ""


NAMES = (
    "canary:net", "canary", "run.canary:net", "os:system", "builtins:exec", "builtins:eval", "subprocess:Popen",
    "shutil:rmtree",
    "torch.hub:load", "torch:load", "timm:canary:net", "timm.models:create_model", "runpy:run_path", "pickle:loads",
    "importlib:import_module",
    "canary:net.__call__", "canary:os.system", "./canary:net", "{here}/canary:net", "canary\n:net", " canary:net",
    "canary :net",
    "TIMM:canary", "torchvision:canary:net", "hf-hub:a/b", "local-dir:run", "timm:local-dir:.", "timm:hf-hub:a/b",
    "hf_hub:a/b",
    "code:interact", "antigravity:fly", "this:s", "idlelib:run", "turtle:Turtle", "recast.lab.cli:main",
    "numpy:fromfile",    "ctypes:CDLL",
)  # fmt: skip


def _named_code(scale: int, number: int, world: Path) -> Iterator[Case]:
    """Code that a file names: in a recipe, a run, a saved file; pickles with code in them. Nothing of it may run."""
    import json
    import pickle
    import struct
    import zipfile

    import yaml

    chance = random.Random(number + 24)
    whole = yaml.safe_load((world / "run/recipe.yaml").read_text())
    header_of = (world / "child.safetensors").read_bytes()
    size = struct.unpack("<Q", header_of[:8])[0]
    header, rest = json.loads(header_of[8 : 8 + size]), header_of[8 + size :]

    def recipe(folder: Path, place: str, name: str, key: str) -> None:
        found = json.loads(json.dumps(whole))
        found[key]["name"] = name
        (folder / place).write_text(yaml.safe_dump(found))

    def saved(folder: Path, name: str, where: str) -> None:
        ours = json.loads(header["__metadata__"]["recast"]) | {"constructor": {"name": name}}
        text = json.dumps(header | {"__metadata__": {"format": "pt", "recast": json.dumps(ours)}}).encode()
        (folder / where).unlink()
        (folder / where).write_bytes(struct.pack("<Q", len(text)) + text + rest)

    def evil(folder: Path, where: str, how: str) -> None:
        class Evil:
            def __reduce__(self) -> tuple[Any, ...]:
                return exec, (f"open({str(folder.parent / 'ran')!r}, 'w').write('ran')",)

        content = pickle.dumps({"model": Evil(), "state_dict": Evil()})
        path = folder / where
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        if how == "plain":
            path.write_bytes(content)
        elif how == "zip":
            with zipfile.ZipFile(path, "w") as file:
                for name, inner in (
                    ("archive/data.pkl", content),
                    ("archive/version", b"3"),
                    ("archive/byteorder", b"little"),
                ):
                    file.writestr(name, inner)
        else:
            import numpy as np

            with zipfile.ZipFile(path, "w") as file:
                for name in ("images", "labels", "predictions", "classes", "layers", "mix_0", "scores", "correct"):
                    head = (
                        b"\x93NUMPY\x01\x00v\x00"
                        + str({"descr": "|O", "fortran_order": False, "shape": ()}).ljust(117).encode()
                        + b"\n"
                    )
                    file.writestr(f"{name}.npy", head + content)
            assert np

    recipes = [
        (place, key, words) for key in ("model", "distill", "data")
        for place, words in (
            ("tiny.yaml", TRAIN), ("run/recipe.yaml", EVALUATE), ("run/recipe.yaml", EXPLAIN_RUN),
            ("half/recipe.yaml", RESUME),
            ("run/recipe.yaml", REPORT), ("run/recipe.yaml", "train run/recipe.yaml --epochs 0 --out new"),
            ("tiny.yaml", f"{TRAIN} --trust"), ("run/recipe.yaml", f"{EVALUATE} --trust"),
        )
    ]  # fmt: skip
    pickles = (
        ("weights.pth", f"{PLAN} --checkpoint weights.pth"), ("weights.pt",
        "train tiny.yaml --epochs 0 --checkpoint weights.pt --out new"),
        ("half/resume/state-00009-00000000.pt", RESUME), ("run/attention.npz", REPORT),
        ("run/weights.safetensors", EVALUATE),
        ("run/scores/clean/recast.npz", EVALUATE), ("child.safetensors", EXPLAIN), ("run/parent.safetensors", EVALUATE),
        ("weights.bin",
        "explain digits_resnet images/a.png --num-classes 10 --img-size 16 --checkpoint weights.bin --out new.html"),
    )  # fmt: skip
    ways: list[tuple[str, str, Callable[[Path], object]]] = []
    for name in NAMES:
        place, key, words = chance.choice(recipes)
        ways.append((f"{key} {name!r} in {place}", words, partial(recipe, place=place, name=name, key=key)))
        ways.append((f"{name!r} in child.safetensors", EXPLAIN, partial(saved, name=name, where="child.safetensors")))
        words = chance.choice((EVALUATE, EXPLAIN_RUN))
        ways.append(
            (f"{name!r} in run/weights.safetensors", words, partial(saved, name=name, where="run/weights.safetensors"))
        )
    for place, words in pickles:
        for how in ("plain", "zip", "npy"):
            ways.append((f"a pickle ({how}) as {place}", words, partial(evil, where=place, how=how)))
    for i in range(scale if scale < len(ways) else len(ways)):
        name, words, prepare = ways[i] if scale >= len(ways) else chance.choice(ways)
        yield Case(
            "code that files name", f"{i}: {name}: {words.split()[0]}", words.split(), prepare, may_change=_kept(words)
        )
