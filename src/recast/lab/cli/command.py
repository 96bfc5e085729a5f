"""Make commands from typed functions: cyclopts reads the words, pydantic validates them. Help does not import cyclopts.

Keyword-only parameters are options, and so are the fields of configs among them: every field has its dotted name
(`--optim.lr`) and a short one (`--lr`). Fields of the kinds of a union are options beside one another.
"""

from __future__ import annotations

import inspect
import json
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from types import NoneType
from typing import TYPE_CHECKING, Annotated, Any, Generic, Literal, NewType, TypeVar, get_args, get_origin

import pydantic
from pydantic_core import PydanticUndefined

from recast.config import Config, File, Keys, Rare, read
from recast.errors import RecastError
from recast.lab.cli.help import HELP, Entry, help_text
from recast.lab.cli.threads import use_threads
from recast.lab.config.fields import Field, fields_of, merge
from recast.lab.config.types import Threads

if TYPE_CHECKING:
    from cyclopts import App

Model = TypeVar("Model", bound=Config)
Line = NewType("Line", str)
"""Annotation of a parameter that gets the command as typed. It is not an option."""
DOTTED = re.compile(r"\b[a-z_]+(?:\.[a-z_]+)+\b")
"""Possible name of a field."""
SENTENCE = re.compile(r"(?<!\.\w)\. ")
"""Separator of sentences; not the full stops of e.g."""


class Output(Config):
    """Output"""

    model_config = pydantic.ConfigDict(validate_by_name=True)

    as_json: bool = pydantic.Field(False, alias="json")
    """Machine-readable output; progress stays on standard error."""
    quiet: Annotated[bool, Rare()] = False
    """Print only errors on standard error, no progress and no notes."""
    verbose: Annotated[bool, Rare()] = False
    """Also show the traceback of an error."""


class Compute(Output):
    """Output"""

    threads: Annotated[Threads | None, Rare()] = None
    """Threads of the CPU. None: OMP_NUM_THREADS, else the cores that other programs leave free."""


class Option:
    """A field as an option of cyclopts: its names, values and help."""

    def __init__(self, field: Field, dotted: str, short: str) -> None:
        self.field, self.dotted, self.short = field, dotted, short
        items = leaves(field.info.annotation)
        words = field.choices or next((get_args(item) for item in items if get_origin(item) is Literal), ())
        is_open = not field.choices and bool({str, int, float} & set(items))
        kind: Any = bool if bool in items else str if is_open or not words else Literal[words]
        several = next((item for item in items if get_origin(item) in (list, tuple, dict)), None)
        self.is_mapping = get_origin(several) is dict
        count = len(get_args(several)) if get_origin(several) is tuple and ... not in get_args(several) else 0
        self.hint = list[kind] if several else kind
        # a word after one of a few words is more likely the command's own: --suite clean RUN
        self.takes = (1, count) if count else bool(several) and (is_open or not words)
        word = "NUM" if float in items else "N" if int in items else "FILE" if File in field.marks else "TEXT"
        if words:
            word = "TEXT" if is_open else f"{{{','.join(map(str, words))}}}"
        word = f"{word} {word}" if count == 2 else word
        self.metavar = "" if kind is bool else word + " ..." * (several is not None and count != 2)

    def value(self, config: Any) -> Any:
        """Return the value of the field in a config; its default if the config is of another kind."""
        for key in self.field.path:
            config = config.get(key) if isinstance(config, Mapping) else getattr(config, key, None)
        default = self.field.info.get_default()
        return default if config is None and default is not PydanticUndefined else config

    def help(self, everything: bool, config: Any) -> str:
        """Return the field's docstring, or its first sentence, and its value in a config or by default."""
        text, value = " ".join((self.field.info.description or "").split()), self.value(config)
        value = "on" * value if isinstance(value, bool) else value
        value = [f"{name}={item}" for name, item in value.items()] if isinstance(value, dict) else value
        value = " ".join(map(str, value)) if isinstance(value, list | tuple) else value
        text = (text.replace("None: ", "Default: ") if everything else SENTENCE.split(text)[0]).rstrip(".")
        text += f" [{value}]" * (value not in (None, ""))
        return f"{', '.join(self.field.kinds)}: {text}" if self.field.kinds else text


def leaves(hint: Any) -> list[Any]:
    """Return the types and the marks of Annotated inside a type; sequences, mappings and Literals also as a whole."""
    if get_origin(hint) in (None, Literal):
        return [hint]
    parts = [hint.__origin__, *hint.__metadata__] if get_origin(hint) is Annotated else get_args(hint)
    itself = [hint] if get_origin(hint) in (list, tuple, dict) else []
    return itself + [leaf for part in parts for leaf in leaves(part) if leaf is not NoneType]


@dataclass
class Part:
    """The options of one config: a parameter of a function, or the plain parameters of the function.

    is_typed: the function gets the words, not the config. has_base: the config is laid over another one, so that
    switches can be turned off. words: names of options that are words of the command instead.
    """

    model: type[Config]
    is_typed: bool = False
    has_base: bool = False
    words: Sequence[str] = ()

    @cached_property
    def options(self) -> dict[Keys, Option]:
        """The options by the path of their field. Of two fields with the same name the deeper gets a longer option."""
        options: dict[Keys, Option] = {}
        names: set[str] = set()
        fields = fields_of(self.model)
        for field in sorted(fields, key=lambda field: len(field.path)):
            full = (*field.path[:-1], field.info.alias or field.path[-1])
            named = full[:-1] if full[-1] in ("name", "kind") and full[1:] else full
            short = named[-1] if named[-1] not in names else "-".join(named[-2:])
            names.add(named[-1])
            options[field.path] = Option(field, *(f"--{name.replace('_', '-')}" for name in (".".join(full), short)))
        words = {f"--{word}" for word in self.words}
        return {field.path: options[field.path] for field in fields if options[field.path].short not in words}

    def entries(self, everything: bool, base: Any, with_values: bool) -> Iterator[tuple[str, Entry]]:
        """Yield heading and entry of every option for the help. Rare ones are shown by --help-all."""
        base = base or self.model()
        for option in self.options.values():
            if everything or Rare not in option.field.marks:
                heading = option.field.section.__name__.removesuffix("Config").removesuffix("Options") or "Options"
                name = f"--[no-]{option.short[2:]}" if self.can_be_off(option, base) else option.short
                yield heading, (f"{name} {option.metavar}".rstrip(), option.help(everything or with_values, base))

    def can_be_off(self, option: Option, base: Any) -> bool:
        """Return True if the option is a switch that --no-NAME turns off."""
        return option.hint is bool and (self.has_base or option.value(base) is True)

    def parameters(self, name: str) -> Iterator[inspect.Parameter]:
        """Yield a keyword-only parameter for each option, as cyclopts reads it; completion shows their help."""
        from cyclopts import Parameter  # takes as long as the rest of a call for help

        base = self.model()
        for path, option in self.options.items():
            settings = Parameter(
                name=tuple(dict.fromkeys((option.dotted, option.short))),
                help=option.help(not name, base),
                show=Rare not in option.field.marks,
                consume_multiple=option.takes,
                negative=f"--no-{option.short[2:]}" if self.can_be_off(option, base) else (),
            )
            hint: Any = Annotated[option.hint | None, settings]
            key = "__".join((name, *path))
            yield inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=hint)

    def name(self, path: Keys) -> str:
        """Return the option of a field, or of a union's kind, as an error names it."""
        option = self.options.get(path) or self.options.get((*path, "kind"))
        return option.short if option else ".".join(path)


class Typed(Generic[Model]):
    """The typed options of a config, to be laid over another one. Annotation of a parameter."""

    def __init__(self, part: Part, words: Mapping[Keys, Any]) -> None:
        self.name, self.model, self.words, self.options = part.name, part.model, words, part.options

    @property
    def changes(self) -> dict[str, Any]:
        """The words as nested data. Commas separate values but in NAME=VALUE; null is None."""
        changes: dict[str, Any] = {}
        for path, words in self.words.items():
            target = changes
            for key in path[:-1]:
                target = target.setdefault(key, {})
            if isinstance(words, list) and not self.options[path].is_mapping:
                words = [part for word in words for part in word.split(",") if part]
            target[path[-1]] = None if words in ("null", ["null"]) else words
        return changes

    def over(self, base: Mapping[str, Any]) -> Model:
        """Return the config with the values of `base` and the typed ones. Raises RecastError that names the option."""
        return read(self.model, merge(self.model, base, self.changes), name=self.name)  # type: ignore[return-value]

    @contextmanager
    def named(self) -> Iterator[None]:
        """Name the options instead of the fields of the config in errors of the block."""
        try:
            yield
        except RecastError as error:
            error.args = (DOTTED.sub(lambda match: self.name(tuple(match[0].split("."))), str(error)),)
            raise


class Command:
    """A typed function as a command of `recast`.

    Args:
        function: returns the exit code. Its positional parameters are words, named by the usage; each keyword-only one
            is an option, a config whose fields are options, `Typed[Config]`, or the `Line`.
        usage: the words and options behind the command's name.
        examples: the end of its help.
        describe: returns, for the words of a call for help, a longer description, and the config with the defaults of
            a `Typed` parameter.
    """

    def __init__(
        self,
        function: Callable[..., int],
        usage: str,
        examples: str = "",
        describe: Callable[[Sequence[str]], tuple[str, Any]] | None = None,
    ) -> None:
        self.function, self.usage, self.examples, self.describe = function, usage, examples, describe
        self.name = function.__name__.rstrip("_")  # try is a word of Python
        self.argv: Sequence[str] = ()
        self.__annotations__: dict[str, Any] = {}  # cyclopts asks for them; those of the signature count
        about, _, docs = (inspect.getdoc(function) or "").partition("\n\nArgs:\n")
        self.about = "\n\n".join(" ".join(paragraph.split()) for paragraph in about.split("\n\n"))
        help_of = dict(re.findall(r"^    (\w+): (.+(?:\n {8}.+)*)", docs, re.MULTILINE))
        self.words: dict[str, tuple[inspect.Parameter, str]] = {}
        """Positional parameters and their help, by their label in the usage."""
        labels = usage.split()
        self.line = ""
        parts: dict[str, Part] = {}
        plain: dict[str, Any] = {}
        for name, parameter in inspect.signature(function, eval_str=True).parameters.items():
            hint = parameter.annotation
            model = get_args(hint)[0] if get_origin(hint) is Typed else hint
            if parameter.kind is not inspect.Parameter.KEYWORD_ONLY:
                self.words[labels[len(self.words)]] = parameter, " ".join(help_of[name].split()).rstrip(".")
            elif hint is Line:
                self.line = name
            elif isinstance(model, type) and issubclass(model, Config):
                words = [word.name for word, _ in self.words.values()]
                is_typed = get_origin(hint) is Typed
                has_base = is_typed and describe is not None
                parts[name] = Part(model, is_typed, has_base, words)
            else:
                plain[name] = (parameter.annotation, pydantic.Field(parameter.default, description=help_of[name]))
        options = pydantic.create_model("Options", __base__=Config, __doc__="Options", **plain)
        self.parts = {"": Part(options), **parts}

    @property
    def __signature__(self) -> inspect.Signature:
        """The words, then all options, as cyclopts reads them."""
        from cyclopts import Parameter

        parameters: list[inspect.Parameter] = []
        for label, (word, text) in self.words.items():
            settings = Parameter(name=label.strip("[]"), required=not label.startswith("["), help=text)
            parameters.append(word.replace(annotation=Annotated[word.annotation, settings]))
        return inspect.Signature(
            [*parameters, *(o for name, part in self.parts.items() for o in part.parameters(name))]
        )

    def app(self, argv: Sequence[str]) -> App:
        """Return the command as an application of cyclopts; `argv` are the words behind its name."""
        from cyclopts import App

        self.argv = argv
        for part in self.parts.values():
            vars(part).pop("options", None)  # papers may have added some
        return App(name=self.name, help=self.about, default_command=self, version_flags=[], help_flags=HELP)

    def help(self, argv: Sequence[str]) -> str:
        """Return the help; `argv` are the words behind the command's name."""
        about, base = self.describe(argv) if self.describe else ("", None)
        panels: dict[str, list[Entry]] = {
            "Arguments": [(label.strip("[]"), text) for label, (_, text) in self.words.items()]
        }
        for name, part in self.parts.items():
            for heading, entry in part.entries("--help-all" in argv, base if part.has_base else None, not name):
                panels.setdefault(heading, []).append(entry)
        usage = f"recast {self.name} {self.usage}"
        return help_text(usage, about or self.about, panels, f"Examples:\n{self.examples}")

    def __call__(self, *args: Any, **typed: Any) -> int:
        """Validate the values that cyclopts has read, and call the function."""
        values: dict[str, Any] = {self.line: shlex.join(["recast", self.name, *self.argv])} if self.line else {}
        for part_name, part in self.parts.items():
            words = {path: typed.get("__".join((part_name, *path))) for path in part.options}
            options: Typed[Any] = Typed(part, {path: word for path, word in words.items() if word is not None})
            if part.is_typed:
                values[part_name] = options
                continue
            config = options.over({})
            values |= {part_name: config} if part_name else dict(config)
            if isinstance(config, Compute):
                use_threads(config.threads)
        return self.function(*args, **values)


def print_json(content: Any) -> None:
    """Print machine-readable output to standard output, see `recast.lab.cli.guard`."""
    text = content if isinstance(content, str) else json.dumps(content, indent=1)
    print(text, file=getattr(sys.stdout, "result", sys.stdout))
