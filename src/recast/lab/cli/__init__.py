"""The command `recast`, a thin layer over the library. The module of a command is imported when it is called.

Its own help and version import no library; the help of a command imports its configs, and no parser.

Exit codes: 0 done, 1 a check failed (`verify`), 2 a mistake in the request, 130 interrupted.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from functools import partial
from keyword import iskeyword
from typing import TYPE_CHECKING, Any

from recast import __version__
from recast.errors import RecastError, shown
from recast.lab.cli.guard import check_alone, complain, describe_error, guarded_streams, later_process, one_line
from recast.lab.cli.help import HELP, help_text
from recast.lab.cli.paths import check_paths

if TYPE_CHECKING:
    from cyclopts import App, CycloptsError

    from recast.lab.cli.command import Command

COMMANDS = {
    "quickstart": "Recast, train and compare on embedded data, in minutes",
    "try": "Say whether attention helps on your images, in minutes",
    "plan": "Show which layers become attention, and at what cost",
    "verify": "Recast a model and compare it with its parent",
    "train": "Recast a trained network and fine-tune it, with a control without attention",
    "evaluate": "Measure the arms of a run: accuracy, attacks, corruptions, cost",
    "explain": "Show where a network looks in an image",
    "fold": "Turn closed heads back into convolutions, or close heads one by one",
    "export": "Write ONNX or a torch.export program, and check the file",
    "report": "Write one HTML page about one or several runs",
}
OPTIONS = {
    "--help": "Display this message and exit.",
    "--install-completion": "Install completion with TAB for this shell.",
    "--version": "Display the version and exit.",
}
ABOUT = """Recast the convolutions of a trained network as gated positional self-attention without changing its \
outputs, then fine-tune it."""
UNEXTENDED = ("quickstart", "train", "try")
"""Commands that load what extends the library once a recipe, an option or a data set requires it."""
ALIKE = 0.78
"""Similarity (of difflib) from which on an option is suggested for another: --lr for --leer, not --gate for --lrate."""
END = """
  recast COMMAND --help   options and examples of a command; --help-all: all options

start here:  recast quickstart
"""


def main(argv: Sequence[str] | None = None, extend: Callable[[], None] = lambda: None) -> int:
    """Run one command and return its exit code.

    Args:
        argv: the words behind the command's name; None: those of the process.
        extend: called before a command is loaded, to add to its options; for `UNEXTENDED` ones if that is required.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["help"]:
        words = [*words[1:2], "--help"]
    call, flags = _parse(words, extend)
    with guarded_streams("as_json" in flags, "quiet" in flags) as out, _one_line_warnings():
        name = f"recast {words[0]}" if words and words[0] in COMMANDS else "recast"
        code = _run(call, name, "verbose" in flags)
        out.flush()  # a pipe whose reader has gone says so here, not at the interpreter's exit
        trains = words[:1] in (["train"], ["quickstart"])  # and left its results in files
        if not (code or trains or out.failed is None or isinstance(out.failed, BrokenPipeError)):
            code = complain("recast", f"error: standard output: {getattr(out.failed, 'strerror', out.failed)}")
    return code


def _parse(words: list[str], extend: Callable[[], None]) -> tuple[Callable[[], Any], set[str]]:
    """Return the call for the words, which raises if they are wrong, and the output options that are on."""
    try:
        if (text := _help(words, extend)) is not None:
            return partial(print, text), set()
        if words[0] in COMMANDS and words[0] not in ("train", "evaluate"):
            check_alone(words[0])
        if words[0] not in UNEXTENDED:
            extend()
            command, bound = _bound(words)
        else:
            from recast.lab.config.recipe import EXTENSIONS

            EXTENSIONS.append(extend)
            try:
                command, bound = _bound(words)
            except RecastError:
                extend()
                command, bound = _bound(words)
    except BaseException as error:  # a mistake, or a module of a command that cannot be imported
        return partial(_refuse, error), {"verbose"} & {word.removeprefix("--") for word in words}
    flags = {name for name in ("as_json", "quiet", "verbose") if bound.kwargs.get(f"output__{name}")}
    return partial(command, *bound.args, **bound.kwargs), flags


def _help(words: list[str], extend: Callable[[], None]) -> str | None:
    """Return the help or the version that the words ask for; None for a command to run, or a mistake."""
    flags = set(words[: words.index("--")] if "--" in words else words) & set(HELP)
    name, *rest = [word for word in words if word not in HELP] or ["--help"]
    if flags and name in COMMANDS:
        extend()
        return _command(name).help([*rest, *flags])
    if not words or (flags and name.startswith("-")):
        return help_text("recast COMMAND [options]", ABOUT, {"Commands": [*COMMANDS.items(), *OPTIONS.items()]}, END)
    return f"recast {__version__}" if name == "--version" else None


def _path(name: str) -> str:
    """Return the module of a command."""
    return f"recast.lab.cli.{name}{'_' * iskeyword(name)}"


def _command(name: str) -> Command:
    command: Command = importlib.import_module(_path(name)).COMMAND
    return command


def _bound(words: list[str]) -> tuple[Callable[..., Any], inspect.BoundArguments]:
    """Return the function of the words and its arguments. Raises RecastError for a mistake."""
    from cyclopts import CycloptsError

    if words[0] in COMMANDS:
        check_paths(_command(words[0]), words[1:])
    try:
        command, bound, _ = _app(words).parse_args(words, exit_on_error=False, print_error=False)
    except CycloptsError as error:
        raise RecastError(_message(error, words[0])) from None
    return command, bound


def _message(error: CycloptsError, command: str) -> str:
    """Describe a mistake in the words of a command in one line."""
    from cyclopts import MissingArgumentError, UnknownOptionError, UnusedCliTokensError

    if isinstance(error, UnknownOptionError):
        option = (error.token.keyword or error.token.value).partition("=")[0]
        names = [name for argument in error.argument_collection if argument.parse for name in argument.names]
        names = [name for name in names if ("." in name) == ("." in option)]
        close = get_close_matches(option, names, n=1, cutoff=ALIKE)
        return f"unknown option {shown(option)}." + "".join(f" Did you mean {name}?" for name in close)
    if isinstance(error, UnusedCliTokensError):
        return f"unexpected argument {shown((error.unused_tokens or [''])[0])}"
    if isinstance(error, MissingArgumentError) and error.argument:
        name = error.argument.names[-1]
        if name.startswith("-"):
            return f"{name} requires a value"
        example = _command(command).examples.strip().splitlines()[0].partition("  ")[0]
        return f"{name} is missing: for example, {example}"
    message = " ".join(str(error).split())
    return message[:1].lower() + message[1:]


def _refuse(error: BaseException) -> None:
    raise error


def _app(words: Sequence[str]) -> App:
    """Return the application. Only the module of the called command is imported."""
    from cyclopts import App

    app = App(name="recast", help=ABOUT, help_flags=HELP, version=f"recast {__version__}")
    for name, text in COMMANDS.items():
        if words[:1] == [name]:
            app.command(_command(name).app(words[1:]), name=name)
        else:
            app.command(f"{_path(name)}:COMMAND", name=name, help=text, sort_key=len(app._commands))
    app.register_install_completion_command(add_to_startup=False, help=OPTIONS["--install-completion"])
    return app


def _run(call: Callable[[], Any], name: str, verbose: bool) -> int:
    try:
        return int(call() or 0)
    except KeyboardInterrupt as error:
        return 130 if later_process() else complain(name, str(error) or "interrupted", 130)  # the first process says it
    except BaseException as error:  # a user's module may raise SystemExit, GeneratorExit or a kind of its own
        if isinstance(error, RecastError) and error.is_reported:
            return 2
        if verbose:
            traceback.print_exception(error)
        return complain(name, f"error: {describe_error(error)}")


@contextmanager
def _one_line_warnings() -> Iterator[None]:
    """Print warnings as one line on stderr, without their place in the code."""

    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        print(f"note: {one_line(message)}", file=sys.stderr)

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield
