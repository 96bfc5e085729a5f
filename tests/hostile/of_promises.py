"""What a user can do with whole files: mix them up, turn over a digit, put outputs over inputs, give folders strange
names, ask for too much, start again where a run was killed; and what the library promises of models it changed."""

from __future__ import annotations

import os
import random
import re
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from judging import Case, Result
from of_files import EVALUATE, EXPLAIN_RUN, PLAN, REPORT, RESUME, TRAIN, _kept
from safetensors.torch import load_file, save_file

TRAIN_AGAIN = f"{TRAIN} --resume auto"
TOLD = re.compile(r"(?i)damaged|truncated|not as the run wrote it|other run|has lost")


def promise_cases(scale: int, number: int, world: Path) -> Iterator[Case]:
    """All of this module, `scale` cases of a kind."""
    chance = random.Random(number + 80)
    kinds = (_digits(chance, 4 * scale), _mixed(), _overwrites(), _named(), _large(), _started_again(), _weights(),
             _promises())  # fmt: skip
    for kind in kinds:
        cases = list(kind)
        yield from chance.sample(cases, min(scale, len(cases)))


# --- digits -----------------------------------------------------------------------------------------------------------


def _digits(chance: random.Random, count: int) -> Iterator[Case]:
    """A digit of a text that carries a checksum is another one: it is told."""
    files = (
        ("run/recipe.yaml", REPORT), ("run/recipe.yaml", EVALUATE), ("run/recipe.yaml", EXPLAIN_RUN),
        ("half/recipe.yaml", RESUME), ("run/recipe.yaml", "train run/recipe.yaml --epochs 0 --out new"),
        ("run/metrics.jsonl", REPORT), ("run/finetuned/metrics.jsonl", REPORT), ("half/metrics.jsonl", RESUME),
    )  # fmt: skip
    for i in range(count):
        name, words = files[i % len(files)]
        place, other = chance.random(), chance.randrange(1, 10)
        yield Case(
            "a digit of recipe.yaml or metrics.jsonl", f"{i}: {name}: {words.split()[0]}", words.split(),
            partial(_turned, name=name, place=place, by=other), _must_tell, may_change=_kept(words),
        )  # fmt: skip


def _turned(folder: Path, name: str, place: float, by: int) -> None:
    path = folder / name
    text = path.read_text(encoding="utf-8")
    # first digits: behind the sixteenth another one may be the same number
    digits = [found.start() for found in re.finditer(r"(?<=[ \[])[1-9](?=[,\n.])", text.partition("# sha256")[0])]
    at = digits[int(place * len(digits))]
    path.write_text(text[:at] + str((int(text[at]) + by) % 10) + text[at + 1 :], encoding="utf-8")


def _must_tell(result: Result) -> str:
    return "" if TOLD.search(result.err) else f"taken for whole: {result.out[:100]}"


# --- files that are whole, in the wrong places ------------------------------------------------------------------------

SWAPPED = (
    ("run/weights.safetensors", "run/finetuned/weights.safetensors"), ("run/weights.safetensors", "child.safetensors"),
    ("run/weights.safetensors", "weights.safetensors"), ("run/parent.safetensors", "run/weights.safetensors"),
    ("run/parent.safetensors", "weights.pth"), ("run/recipe.yaml", "tiny.yaml"), ("run/recipe.yaml", "run/plan.json"),
    ("run/metrics.jsonl", "run/rows.csv"), ("run/rows.csv", "run/differences.csv"), ("run/rows.csv", "index.csv"),
    ("run/plan.json", "run/verify.json"), ("run/classes.json", "run/environment.json"),
    ("run/attention.npz", "run/scores/clean/recast.npz"), ("run/evaluation.json", "run/schedule.json"),
    ("run/scores/clean/recast.npz", "run/scores/clean/parent.npz"),
)  # fmt: skip
RUN_ON = (
    ("half/parent.safetensors", "weights.safetensors"), ("half/parent.safetensors", "child.safetensors"),
    ("half/metrics.jsonl", "run/metrics.jsonl"), ("half/plan.json", "run/verify.json"),
    ("half/recipe.yaml", "tiny.yaml"), ("half/classes.json", "run/environment.json"),
    ("half/resume/state-00009-00000000.pt", "weights.pth"),
)  # fmt: skip


def _mixed() -> Iterator[Case]:
    """A file has another one's content: of another arm, another kind, another run."""
    for pairs, lines in ((SWAPPED, (REPORT, EVALUATE, EXPLAIN_RUN)), (RUN_ON, (RESUME,))):
        for target, source in pairs:
            for words in lines:

                def prepare(folder: Path, target: str = target, source: str = source) -> None:
                    content = (folder / source).read_bytes() if (folder / source).exists() else b"{}"
                    (folder / target).unlink(missing_ok=True)
                    (folder / target).write_bytes(content)

                name = f"{target} holds {source}: {words.split()[0]}"
                yield Case("files mixed up", name, words.split(), prepare, may_change=_kept(words))


def _overwrites() -> Iterator[Case]:
    """What a command would write is a file of the user's or of a run: it is left as it was."""
    mine = ("images/a.png", "run/recipe.yaml", "run/weights.safetensors", "notes.txt", "tiny.yaml", "canary.py",
            "data.zip", "run", "images", ".")  # fmt: skip
    for target in mine:
        for words in ("explain run images/a.png", "explain run images", "report run", f"{TRAIN.split(' --out')[0]}"):
            # a page of its own is replaced, and so is a folder that holds nothing
            yield Case("outputs over inputs", f"{words.split()[0]} {words[8:20]} --out {target}",
                       [*words.split(), "--out", target], refused=True)  # fmt: skip


# --- names of folders -------------------------------------------------------------------------------------------------

STRANGE = ("é", "𝕏", "$\\frac{1}$", "a\x1b[2Jb", "a b", " ", "\udcff\udcfe", "x" * 200, "'", '"', "%s", "a\nb", "[x]",
           "*", "~", "-run", "<b>", "{{7*7}}", "run.html", "a;b", "\u202egnp", "con", "...")  # fmt: skip


def _named() -> Iterator[Case]:
    """A run folder of any name, also where the locale is C."""
    for name in STRANGE:
        for words in (EVALUATE, REPORT, EXPLAIN_RUN, RESUME):
            old = "half" if words == RESUME else "run"
            act = [f"./{name}" if word == old else word for word in words.split()]
            before = (lambda: os.environ.update(LC_ALL="C", LANG="C")) if len(name) % 2 else (lambda: None)
            yield Case(
                "names of run folders", f"{name!r}: {words.split()[0]}", act, partial(_moved, old=old, new=name),
                may_change=(f"{name.replace('[', '[[]')}/*", "*/scores/*"), before=before,
            )  # fmt: skip


def _moved(folder: Path, old: str, new: str) -> None:
    (folder / old).rename(folder / new)


# --- too much ---------------------------------------------------------------------------------------------------------


def _large() -> Iterator[Case]:
    """Sizes that ask for terabytes or for days: one line before any of it is spent."""
    verify = "verify digits_resnet --img-size 16"
    for words in (
        f"{verify} --num-images 1000000000", f"{verify} --num-images 100000000", f"{verify} --num-classes 99999999",
        "verify digits_resnet --img-size 16384 --num-images 8", "plan digits_resnet --img-size 99999",
        f"{PLAN} --head-dim 99999", f"{PLAN} --num-heads 99999999", f"{PLAN} --budget tokens=1e999",
        f"{TRAIN} --batch-size 999999999", f"{TRAIN} --workers 99999", f"{TRAIN} --img-size 16384",
        f"{TRAIN} --crop-pct 1e-9", f"{TRAIN} --num-classes 999999999", f"{TRAIN} --accumulate 0",
        f"{TRAIN} --accumulate 99999", f"{TRAIN} --keep-every 0", f"{TRAIN} --seed 99999999999999999999999",
        f"{TRAIN} --data.test_size 16384 --img-size 16384", f"{TRAIN} --epochs 99999999999",
        "explain run images --num-images 99999999999 --out new.html", "explain run images/a.png --img-size 99999",
        "evaluate run --suite clean --num-images 0", "evaluate run --suite clean --num-images -5",
        "evaluate run --suite clean --batch-size 99999999999",
    ):  # fmt: skip
        yield Case("too much", words, words.split(), refused="--num-images" not in words or words.endswith(("0", "5")))


# --- killed before the first state ------------------------------------------------------------------------------------

WRITTEN = ("classes.json", "parent.safetensors", "recipe.yaml", "environment.json", "plan.json", "verify.json",
           "metrics.jsonl")  # fmt: skip


def _started_again() -> Iterator[Case]:
    """A run that was killed as its n-th file took its name; a half-written one lies beside."""
    for count in range(len(WRITTEN) + 1):
        for words in (TRAIN, TRAIN_AGAIN, "train --resume new"):
            may_refuse = words == "train --resume new"
            yield Case(
                "killed before the first state", f"{count} files: {words[-20:]}", words.split(),
                partial(_begun, count=count), codes=(0, 2) if may_refuse else (0,), may_change=("new", "new/*"),
            )  # fmt: skip


def _begun(folder: Path, count: int) -> None:
    (folder / "new").mkdir()
    for name in WRITTEN[:count]:
        shutil.copyfile(folder / "half" / name, folder / "new" / name)
    if count == len(WRITTEN):
        lines = (folder / "new" / "metrics.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
        (folder / "new" / "metrics.jsonl").write_text(lines[0], encoding="utf-8")
    else:
        (folder / "new" / f".{WRITTEN[count]}.4194999.tmp").write_bytes(b"{")


# --- weights ----------------------------------------------------------------------------------------------------------

WEIGHTS: dict[str, Callable[[dict[str, torch.Tensor]], Any]] = {
    "NaN": lambda w: w | {"conv1.weight": w["conv1.weight"] * float("nan")},
    "inf": lambda w: w | {"conv1.weight": w["conv1.weight"] + float("inf")},
    "integers": lambda w: w | {"conv1.weight": torch.zeros(w["conv1.weight"].shape, dtype=torch.int64)},
    "truth values": lambda w: w | {"conv1.weight": torch.zeros(w["conv1.weight"].shape, dtype=torch.bool)},
    "complex": lambda w: w | {"conv1.weight": w["conv1.weight"].to(torch.complex64)},
    "one is missing": lambda w: {key: value for key, value in w.items() if key != "conv1.weight"},
    "one too many": lambda w: w | {"conv99.weight": torch.zeros(3)},
    "another shape": lambda w: w | {"conv1.weight": torch.zeros(3, 3)},
    "transposed": lambda w: w | {"conv1.weight": w["conv1.weight"].transpose(0, 1).contiguous()},
    "no numbers": lambda w: w | {"conv1.weight": torch.zeros(0)},
    "nothing": lambda w: {},
    "other names": lambda w: {f"x{i}": value for i, value in enumerate(w.values())},
}


def _weights() -> Iterator[Case]:
    for name, change in WEIGHTS.items():
        for place, words in (
            ("weights.safetensors", f"{PLAN} --checkpoint weights.safetensors"),
            ("weights.pth", f"{TRAIN} --checkpoint weights.pth"),
            ("weights.pth", "explain digits_resnet images/a.png --num-classes 10 --img-size 16 --out new.html "
                            "--checkpoint weights.pth"),
        ):  # fmt: skip

            def prepare(folder: Path, place: str = place, change: Callable[..., Any] = change) -> None:
                found = change(load_file(folder / "weights.safetensors"))
                (folder / place).unlink()
                save_file(found, folder / place) if place.endswith("safetensors") else torch.save(found, folder / place)

            yield Case("weights that do not fit", f"{name}: {words.split()[0]} {place}", words.split(), prepare,
                       refused=True)  # fmt: skip


# --- the library ------------------------------------------------------------------------------------------------------

PROMISES = (
    # whether it holds; an error that is no RecastError is one too
    "bitwise(pickle.loads(pickle.dumps(child)))", "bitwise(copy.deepcopy(child))",
    "bitwise(copy.deepcopy(child).eval())",
    "verify(model, copy.deepcopy(child), x).ok()", "verify(model, child, x[:1]).ok()",
    "not verify(model, child, torch.zeros_like(x)).ok()", "not verify(model, child, torch.ones_like(x)).ok()",
    "not verify(silent, silent_child, x).ok()", "fails(lambda: verify(model, model, x))",
    "same(lambda: recast.plan(model, x))", "same(lambda: verify(model, child, x))",
    "same(lambda: fails(lambda: recast.recast_(child, p)))", "same(lambda: recast.trace(model, p, x))",
    "all(m.backend == 'auto' for m in child.modules() if isinstance(m, recast.GPSA))",
    "torch.func.vmap(child.eval())(x[:, None]).shape == (2, 1, 10)",
    "torch.func.grad(lambda y: child.eval()(y).sum())(x).isfinite().all()",
    "torch.func.jacrev(lambda y: child.eval()(y[None])[0])(x[0]).shape == (10, 3, 16, 16)",
    "bitwise(torch.nn.DataParallel(child).module)", "recast.Plan.from_json(p.to_json()) == p",
    "fails(lambda: recast.Plan.from_json(p))", "fails(lambda: recast.Schedule.listed(p, ['*']))",
    "fails(lambda: recast.Schedule.listed(p, {1: '*'}))", "fails(lambda: recast.Schedule.at_once(None, 1))",
    "fails(lambda: child.double()(x))",
    "not any(q.requires_grad for q in recast.recast_(frozen, recast.plan(frozen, x)).parameters())",
    "recast.recast_(held, recast.plan(held, x)).layer3[1].conv2.get_buffer('mine').sum() == 3",
    "(recast.save(child, 'new.safetensors', {'name': 'digits_resnet', 'kwargs': {'num_classes': 10}}), "
    "bitwise(recast.load('new.safetensors')))[1]",
)  # fmt: skip


def _promises() -> Iterator[Case]:
    for promise in PROMISES:
        yield Case("library, promises", promise, partial(_promised, promise=promise), codes=(0,),
                   wrong=lambda result: "" if "it holds" in result.out else result.out[-300:])  # fmt: skip


def _promised(folder: Path, promise: str) -> int:
    """In the child: whether it holds is printed."""
    import copy
    import pickle

    import timm

    import recast
    from recast.errors import RecastError

    torch.manual_seed(0)
    model, x = timm.create_model("digits_resnet", num_classes=10).eval(), torch.randn(2, 3, 16, 16)
    p = recast.plan(model, x)
    child, frozen, held, silent = (copy.deepcopy(model) for _ in range(4))
    recast.recast_(child, p)
    frozen.requires_grad_(False)
    held.layer3[1].conv2.register_buffer("mine", torch.ones(3))
    for module in silent.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            torch.nn.init.zeros_(module.weight)
    silent_child = recast.recast_(copy.deepcopy(silent), recast.plan(silent, x))

    def bitwise(other: torch.nn.Module) -> bool:
        with torch.no_grad():
            return torch.equal(other.eval()(x), model(x))

    def fails(call: Callable[[], object]) -> bool:
        try:
            call()
        except (RecastError, RuntimeError) as error:
            return len(str(error).strip().splitlines()) == 1 or not isinstance(error, RecastError)
        return False

    def same(call: Callable[[], object]) -> bool:
        def look() -> list[object]:
            weights = [value.sum().item() for one in (model, child) for value in one.state_dict().values()]
            modes = [module.training for one in (model, child) for module in one.modules()]
            return [weights, modes, torch.get_rng_state().sum().item(), random.getstate(), torch.is_grad_enabled()]

        before = look()
        call()
        return look() == before

    known = {**locals(), "recast": recast, "torch": torch, "copy": copy, "pickle": pickle, "verify": recast.verify}
    print("it holds" if eval(promise, known) else "it does not hold")
    return 0
