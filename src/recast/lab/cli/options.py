"""The options of a command are the fields of a dataclass: their types, defaults and docstrings; one grammar for all.

Every field of a recipe is an option under its dotted name (`--optim.lr`) and under its last part (`--lr`), with `-` or
`_`. Switches are `--json` and `--no-control`, lists `--where a b` or `--suite clean,fgsm`. Values are read as a recipe
file's are (`recast.fields`), and a mistake is one line.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, TypeAlias, TypeVar, get_args

from recast.config import Classes, Threads, check_value, field_types, read_value, words_of
from recast.errors import RecastError, suggest
from recast.lab.cli.guard import COMPLETE, HelpShown
from recast.lab.cli.help import OUTPUT, Command, Option, field_docs, show_help
from recast.lab.config import Recipe, evaluation
from recast.lab.threads import use_threads
from recast.layers.config import PoolConfig, RecastConfig
from recast.reading import parse_yaml

GREEDY = {"where": r".*", "dates": r"\d+:.*", "sizes": r"\d+(x\d+)?"}
"""Lists of words that go on over the following words that match; lists of numbers go on over numbers. Any list may be
one word with commas."""
NUMBER = r"-?[\d.,]+(e-?\d+)?"
SWITCHED = ("true", "false", "yes", "no", "on", "off", "null")

Words: TypeAlias = dict[str, str]
"""Field → how many words without dashes it takes: "1", "?" (one or none), "*", "+" (one or more)."""

Asked = TypeVar("Asked")


def parse(command: Command, asked: Asked, argv: Sequence[str]) -> Asked:
    """`asked`, which holds the defaults, with what `argv` gives; `--help` prints the help and leaves.

    Words that belong to no option go to the fields that `asked.WORDS` names.
    Raises RecastError in the words that the user typed, with the nearest option or choice.
    """
    options = list(options_of(asked))
    if {"-h", "--help"} & set(argv[: argv.index("--")] if "--" in argv else argv):
        show_help(command, options)
        raise HelpShown
    named = {name: option for option in options if not option.words for name in (option.dotted, option.short)}
    if (begun := os.environ.get(COMPLETE)) is not None:
        print("\n".join(word for word in _completions(options, named, argv, begun) if word.startswith(begun)))
        raise HelpShown
    values: dict[tuple[str, ...], Any] = {}
    words: list[str] = []
    rest = list(argv)
    try:
        while rest and (token := rest.pop(0)) != "--":
            if match := re.fullmatch(r"--([A-Za-z][\w.-]*)(?:=(.*))?", token, flags=re.DOTALL):
                option, given = _take(named, match[1].replace("-", "_"), match[2], rest)
                values[option.path] = read_words(option, given)
            elif token.startswith("-"):
                raise _Unknown(f"unexpected argument {token!r}.")
            else:
                words.append(token)
        values |= _placed(command, options, words + rest)  # whatever follows "--" is a word, -x.jpg too
    except _Unknown as error:
        raise RecastError(f"{error} See recast {command.name} --help") from None
    asked = _changed(asked, values)
    if isinstance(asked, ComputeOptions):
        use_threads(asked.threads)
    return asked


def _completions(options: Sequence[Option], named: Mapping[str, Option], argv: Sequence[str], begun: str) -> list[str]:
    """What may follow the words so far: the words of the option before, options, recipes; for the rest, files."""
    before = named.get(argv[-1].removeprefix("--").replace("-", "_")) if argv and argv[-1].startswith("--") else None
    if before is not None and not before.is_switch:
        return list(words_of(before.hint))
    if begun.startswith("-"):
        switches = [f"--no-{one.shown[2:]}" for one in named.values() if one.is_switch and one.last not in OUTPUT]
        return sorted({one.shown for one in named.values()} | set(switches) | {"--help"})
    if argv or all(option.last != "recipe" for option in options):
        return []
    from recast.lab.recipes import RECIPES  # only here: it reads them all

    return list(RECIPES)


class _Unknown(RecastError):
    """What is typed is no option: the help says what is."""


def options_of(asked: Any, path: tuple[str, ...] = (), prefix: str = "", title: str = "") -> Iterator[Option]:
    """Every field of a dataclass as an option with its value as default; those of groups last, below a title."""
    words: dict[str, str] = getattr(asked, "WORDS", {})
    docs, groups = field_docs(type(asked)), []
    for name, hint in sorted(field_types(type(asked)).items(), key=lambda item: item[0] in OUTPUT):
        value = getattr(asked, name)
        if dataclasses.is_dataclass(value):
            groups.append((name, value))
        else:
            yield Option((*path, name), prefix + name, hint, value, title, words.get(name), docs.get(name, ""))
    for name, value in groups:
        heading = (type(value).__doc__ or "").splitlines()[0].rstrip(".")
        yield from options_of(value, (*path, name), "" if isinstance(value, Recipe) else f"{name}.", heading)


def _take(named: Mapping[str, Option], name: str, value: str | None, rest: list[str]) -> tuple[Option, list[str]]:
    """The option of a name, and its words, which leave `rest`."""
    negated = name.startswith("no_") and (off := named.get(name[3:])) is not None and off.is_switch
    option = named.get(name[3:] if negated else name)
    if option is None:
        raise _no_such(name, named)
    if value is not None:
        return option, [value]
    if option.is_switch:
        spoken = not negated and bool(rest) and rest[0].lower() in SWITCHED
        return option, [rest.pop(0) if spoken else "false" if negated else "true"]
    more = GREEDY.get(option.last, NUMBER if {int, float} & set(option.item_types) else "") if option.is_list else ""
    given: list[str] = []
    while rest and not rest[0].startswith("--") and (not given or re.fullmatch(more, rest[0])):
        given.append(rest.pop(0))
    if not given:
        raise _Unknown(f"{option.shown} needs a value.")
    return option, given


def _no_such(name: str, named: Mapping[str, Option]) -> RecastError:
    if members := [option.shown for dotted, option in named.items() if dotted.startswith(f"{name}.")]:
        return RecastError(f"--{name} is a group of options, give them one by one: {', '.join(members[:3])}, …")
    known = ["--" + one.replace("_", "-") for one in named if ("." in name) == ("." in one)]
    typed = "--" + name.replace("_", "-")
    return _Unknown(f"unknown option {typed}.{suggest(typed, known)}")


def read_words(option: Option, words: list[str]) -> Any:
    """What was typed as a value of the option's type, read as YAML where it is no text."""
    value: Any
    if option.is_list and not (len(words) == 1 and (words[0].startswith("[") or words[0] == "null")):
        # commas separate words, but belong to a regular expression
        parts = [part for word in words for part in ([word] if word.startswith("re:") else word.split(","))]
        value = [_scalar(option, part) for part in parts if part]
    else:
        value = _scalar(option, words[0])
    value = read_value(option.hint, value, option.shown, " ".join(words))
    check_value(option.hint, value, option.shown)
    return value


def _scalar(option: Option, word: str) -> Any:
    if str in option.item_types and not (option.is_list and word.startswith("[")):
        return None if word == "null" and type(None) in get_args(option.hint) else word
    try:
        return parse_yaml(word)
    except ValueError:
        return word


def as_typed(message: str, asked: Any) -> str:
    """A message with the keys of recipes as the options that stand for them, unless it is about a recipe file."""
    if ".yaml" in message:
        return message
    shown = {option.dotted: option.shown for option in options_of(asked) if "." in option.dotted}
    keys = "|".join(map(re.escape, sorted(shown, key=len, reverse=True)))
    return re.sub(rf"(?<![\w./-])({keys})(?![\w.]*\w)", lambda found: shown[found[1]], message)


def _placed(command: Command, options: Sequence[Option], words: list[str]) -> dict[tuple[str, ...], Any]:
    """The words that are no option's, by the path of the field that takes them."""
    values: dict[tuple[str, ...], Any] = {}
    for option in options:
        if option.words is None or not words:
            if option.words in ("1", "+"):
                hint = " (--where takes all words that follow it)" if any(o.last == "where" for o in options) else ""
                raise RecastError(f"recast {command.name} {command.usage}: {option.metavar} is missing{hint}")
            continue
        several = option.words in ("*", "+")
        values[option.path], words = (words, []) if several else (words[0], words[1:])
    if words:
        raise _Unknown(f"unexpected argument {words[0]!r}.")
    return values


def _changed(asked: Asked, values: dict[tuple[str, ...], Any]) -> Asked:
    """A copy with other values, each under the path of its field; groups that nothing is given of stay as they are."""
    own: dict[str, Any] = {path[0]: value for path, value in values.items() if len(path) == 1}
    for name in {path[0] for path in values if len(path) > 1}:
        inner = {path[1:]: value for path, value in values.items() if path[0] == name}
        own[name] = _changed(getattr(asked, name), inner)
    return dataclasses.replace(asked, **own)  # type: ignore[type-var]


@dataclasses.dataclass(kw_only=True)
class OutputOptions:
    """Of every command."""

    json: bool = False
    """machine-readable output; progress stays on standard error"""
    quiet: bool = False
    """no progress and no notes: errors alone on standard error"""
    verbose: bool = False
    """of an error, also where it comes from: its traceback"""


@dataclasses.dataclass(kw_only=True)
class ComputeOptions(OutputOptions):
    """Of the commands that compute."""

    threads: Threads | None = None
    """threads of the CPU; None: OMP_NUM_THREADS, else as many as are fastest beside other programs"""


@dataclasses.dataclass(kw_only=True)
class TrustOption:
    """Of the commands that build what a file names."""

    trust: bool = False
    """run the code (pkg.module:function) that the files name"""


@dataclasses.dataclass
class ModelOptions(ComputeOptions):
    """Of the commands that look at one model: which one, and what of it becomes attention."""

    WORDS: ClassVar[Words] = {"model": "1"}
    model: str = ""
    """timm:NAME (or NAME), torchvision:NAME, upernet|maskrcnn|fasterrcnn|retinanet:NAME, or pkg.module:function"""
    checkpoint: str | None = None
    """weights, .safetensors or .pth"""
    checkpoint_key: str | None = None
    """which weights of a checkpoint with several, e.g. state_dict; None: as timm, a moving average (EMA) first"""
    pretrained: bool = False
    """fetch the registry's own weights"""
    num_classes: Classes | None = None
    """classes of the head"""
    img_size: str | None = None
    """pixels, 224 or 224x160 (height x width)"""
    where: list[str] = dataclasses.field(default_factory=lambda: ["last_stage"])
    """last_stage, all, stage:N, names, globs or re:REGEX; none: the pooling alone"""
    budget: str = "tokens=1024"
    """limits, e.g. macs=1.3x,memory=2GiB"""
    plan: str | None = None
    """a plan.json, edited or not: layers, settings"""
    recast: RecastConfig = dataclasses.field(default_factory=RecastConfig)
    pool: PoolConfig = dataclasses.field(default_factory=PoolConfig)


def parse_size(text: str | None, default: int) -> tuple[int, int]:
    """`--img-size` as height and width."""
    return (default, default) if text is None else evaluation.parse_size(text, "--img-size")


def print_json(content: Any) -> None:
    """Machine-readable output on standard output, where nothing else goes then (`recast.lab.cli.guard`)."""
    text = content if isinstance(content, str) else json.dumps(content, indent=1)
    print(text, file=getattr(sys.stdout, "result", sys.stdout))
