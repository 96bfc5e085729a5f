"""Random damage: to plain data, whose structure is known, and to bytes; drawn by hypothesis from a seed."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

T = TypeVar("T")

NUMBERS = (
    0, -1, 1, 2, 3, 7, 2**15, 2**31, 2**63, 10**40, -(10**40), 0.5, -0.0, 1e-300, 1e300, -1e300, 1e9,
    float("nan"), float("inf"), -float("inf"),
)  # fmt: skip
TEXTS = (
    "", " ", "x", "null", "nan", "1e-4", "0x10", "auto", "none", "all", "true", "-1", "1,2", "{}", "[]", "[[",
    "9" * 5000,
    "x" * 5000, "é" * 300, "\x1b[2J\x1b[31m", "a\nb\r\nc", "\x00", "\u202egnp.exe", "\ufeff", "\ud800",
    "../../../etc/passwd",
    "/dev/zero", "/dev/stdin", "/proc/self/mem", "/nonexistent/x", ".", "..", "~", "notes.txt", "canary", "canary:net",
    "canary.py:net", "run.canary:net", "os:system", "builtins:exec", "subprocess:Popen", "timm:canary", "torchvision:",
    "hf-hub:some/model", "local-dir:.", "timm:hf-hub:a/b", ":", "a:", ":b", "a:b:c", "recast.lab.cli:main",
    "re:(.*)*(.*)*x!",
    "re:(", "re:(?<=a*)b", "re:" + "(a?){50}" * 5 + "a{50}", "[!", "***", "stage:0", "stage:-1", "stage:x",
    "stage:99999999",
    "layer3.1.conv1", "layer9", "$\\frac{1}$", "$", "%s%n{0}", "<script>alert(1)</script>", "{{7*7}}", "--out", "-",
    "macs=1e400x", "tokens=-1", "macs=1.3x,macs=2x", "memory=1e99GiB", "!!python/name:os.system", "16x16", "0x0",
    "99999x99999",
)  # fmt: skip
SHAPES: tuple[Any, ...] = (
    None,
    True,
    False,
    [],
    {},
    [[]],
    [None],
    {"": ""},
    ["x"] * 500,
    [1] * 5,
    [0.1, 0.2],
    {"x": {"x": {}}},
)
DEEP, LONG, TWICE = "@deep@", "@long@", "@twice@"
"""Stand for what no encoder writes: 3,000 lists in one another, a number of 5,000 digits, a key that is there twice."""
VALUES = st.one_of(
    st.sampled_from(NUMBERS), st.sampled_from(TEXTS), st.sampled_from(SHAPES), st.sampled_from((DEEP, LONG)),
    st.integers(-(2**70), 2**70), st.floats(), st.text(max_size=20),
)  # fmt: skip
DAMAGE = (
    "flip", "flips", "truncate", "truncate", "head", "zeros", "cut", "repeat", "append", "noise", "empty", "swap",
    "text",
)  # fmt: skip


def drawn(strategy: SearchStrategy[T], count: int, number: int) -> list[T]:
    """`count` examples of a strategy, always the same for the seed `number`."""
    found: list[T] = []

    @seed(number)
    @settings(
        max_examples=max(2, count), database=None, deadline=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(strategy)
    def collect(example: T) -> None:
        found.append(example)

    collect()
    # hypothesis begins with the simplest; what it draws later is wilder
    return found[-count:] if len(found) >= count else [found[i % len(found)] for i in range(count)]


def places(found: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to every value in plain data, `()` to all of it."""
    yield at
    inner = found.items() if isinstance(found, dict) else enumerate(found) if isinstance(found, list) else ()
    for key, value in inner:
        yield from places(value, (*at, key))


def edits(document: Any) -> SearchStrategy[Any]:
    """Copies of plain data in which one to three values are others, gone, under other names or where others were."""
    ways = list(places(document))
    # of a long list of alike things the first few stand for all
    ways = [way for way in ways if all(not isinstance(step, int) or step < 3 for step in way)]
    edit = st.tuples(
        st.sampled_from(ways), st.sampled_from(("put", "put", "put", "drop", "rename", "copy", "add", "grow")), VALUES,
        st.sampled_from(ways),
    )  # fmt: skip
    return st.lists(edit, min_size=1, max_size=3).map(lambda chosen: _edited(document, chosen))


def _edited(document: Any, chosen: list[tuple[Any, ...]]) -> Any:
    found = {"": copy.deepcopy(document)}
    for way, how, value, other in chosen:
        at = _at(found, ("", *way[:-1])) if way else found
        key = way[-1] if way else ""
        try:
            if how == "put":
                at[key] = copy.deepcopy(value)
            elif how == "drop":
                del at[key]
            elif how == "rename":
                at[str(value)[:50]] = at.pop(key)
            elif how == "copy":
                at[key] = copy.deepcopy(_at(found, ("", *other)))
            elif how == "add" and isinstance(at[key], dict):
                at[key][str(value)[:50]] = copy.deepcopy(value)
            elif isinstance(at[key], list):
                at[key] = at[key] * 3 + [copy.deepcopy(value)]
        except (KeyError, IndexError, TypeError, AttributeError):
            continue  # an edit before it took the place away
    return found.get("", value)


def _at(found: Any, way: tuple[Any, ...]) -> Any:
    for step in way:
        try:
            found = found[step]
        except (KeyError, IndexError, TypeError):
            return None
    return found


def as_json(found: Any, indent: int | None = None) -> bytes:
    """JSON, with what stands for something else written out."""
    text = json.dumps(found, indent=indent, default=str)
    for mark, meant in ((DEEP, "[" * 3000 + "]" * 3000), (LONG, "9" * 5000)):
        text = text.replace(f'"{mark}"', meant)
    return text.encode("utf-8", "surrogatepass")


def as_yaml(found: Any) -> bytes:
    """YAML in the flow style, which is almost JSON; what JSON alone has is written as YAML has it."""
    text = as_json(found).decode("utf-8", "surrogatepass")
    for theirs, ours in (("NaN", ".nan"), ("-Infinity", "-.inf"), ("Infinity", ".inf")):
        text = text.replace(f" {theirs}", f" {ours}")
    return text.encode("utf-8", "surrogatepass")


def damages() -> SearchStrategy[Callable[[bytes], bytes]]:
    """Functions that damage a file's bytes."""
    return st.tuples(st.sampled_from(DAMAGE), st.integers(0, 2**32)).map(lambda how: Damage(*how))


class Damage:
    """One way of damaging bytes, at a place that follows from a number."""

    def __init__(self, how: str, number: int) -> None:
        self.how, self.number = how, number

    def __repr__(self) -> str:
        return f"{self.how}-{self.number}"

    def __call__(self, content: bytes) -> bytes:
        chance, found = random.Random(self.number), bytearray(content)
        size = len(found)
        if not size:
            return chance.randbytes(40)
        # what says how to read a file stands at its head or its tail
        at = chance.choice(
            (chance.randrange(size), chance.randrange(min(size, 300)), -1 - chance.randrange(min(size, 300)))
        )
        at %= size
        length = chance.choice((1, 8, 100, max(1, size // 3)))
        match self.how:
            case "flip":
                found[at] ^= 1 << chance.randrange(8)
            case "flips":
                for _ in range(20):
                    found[chance.randrange(size)] ^= 1 << chance.randrange(8)
            case "truncate":
                del found[at:]
            case "head":
                del found[:at]
            case "zeros":
                found[at : at + length] = bytes(len(found[at : at + length]))
            case "cut":
                del found[at : at + length]
            case "repeat":
                found[at:at] = found[at : at + length]
            case "append":
                found += chance.choice((b"\0", b"\n{}", b"x" * 1000, bytes(found[:length])))
            case "noise":
                found[at : at + length] = chance.randbytes(length)
            case "empty":
                found = bytearray(chance.choice((b"", b"\n", b"\0", b"[]", b"{}", b"null")))
            case "swap":
                found = found[size // 2 :] + found[: size // 2]
            case "text":
                found = bytearray(
                    chance.choice((b"\xff\xfe", b"\xef\xbb\xbf", b"\x1f\x8b\x08", b"PK\x03\x04", b"\x80\x04."))
                    + content
                )
        return bytes(found)
