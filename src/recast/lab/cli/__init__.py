"""The command `recast`, a thin layer over the library. The module of a command is imported when it is called.

Exit codes: 0 done, 1 a check failed (`verify`, `check`), 2 a mistake in the request, 130 interrupted.
"""

from __future__ import annotations

import importlib
import shutil
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from keyword import iskeyword
from typing import TYPE_CHECKING, Any

from cyclopts import App, CycloptsError, MissingArgumentError, UnusedCliTokensError

from recast import __version__
from recast.errors import RecastError, one_line, shown
from recast.lab.cli.command import HELP, Columns, Output
from recast.lab.cli.guard import complain, describe_error, guarded_streams, later_process

if TYPE_CHECKING:
    from rich.console import Console

COMMANDS = {
    "quickstart": "The whole story on embedded data, in minutes",
    "try": "Say whether attention helps on your images, in minutes",
    "plan": "What of a model becomes attention, and at what cost",
    "verify": "Recast a model and compare it with its parent",
    "train": "Recast a parent and train on, beside the parent trained the same way",
    "evaluate": "Measure the arms of a run: accuracy, attacks, corruptions, cost",
    "explain": "Show where a network looks in an image",
    "fold": "Give a trained network its smallest form, close heads one by one",
    "check": "Verify what a saved file says of itself",
    "export": "Write ONNX or a program of torch.export, and check the file",
    "report": "Make one HTML page of one or several runs",
}
ABOUT = """Recast the convolutions of a trained network as gated positional self-attention,
without changing what it computes; then train on."""
END = """
  recast COMMAND --help   options and examples of a command; --help-all: the rare options too

start here:  recast quickstart
"""


def main(argv: Sequence[str] | None = None, extend: Callable[[], None] = lambda: None) -> int:
    """Run one command and return its exit code.

    Args:
        argv: the words behind the command's name; None: those of the process.
        extend: called before a command is loaded, to add to its options.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["help"]:
        words = [*words[1:2], "--help"]
    call, output = _parse(words, extend)
    with guarded_streams(output.as_json, output.quiet) as out, _one_line_warnings():
        code = _run(call, words[0] if words[:1] and words[0] in COMMANDS else "", output.verbose)
        out.flush()  # a pipe whose reader has gone says so here, not at the interpreter's exit
        trains = words[:1] in (["train"], ["quickstart"])  # and left its results in files
        if not (code or trains or out.failed is None or isinstance(out.failed, BrokenPipeError)):
            code = complain("recast", f"error: standard output: {out.failed.strerror}")
    return code


def _parse(words: list[str], extend: Callable[[], None]) -> tuple[Callable[[], Any], Output]:
    """Return the call for the words, which raises if they are wrong, and the output options."""
    try:
        if set(words) - {*HELP, "--version"}:
            extend()
        command, bound, _ = _app(words).parse_args(words, exit_on_error=False, print_error=False)
        typed = {name: bool(bound.kwargs.get(f"output__{name}")) for name in ("as_json", "quiet", "verbose")}
        return partial(command, *bound.args, **bound.kwargs), Output(**typed)
    except CycloptsError as error:
        return partial(_refuse, RecastError(_message(error))), Output()
    except BaseException as error:  # a module of a command cannot be imported
        return partial(_refuse, error), Output()


def _message(error: CycloptsError) -> str:
    """Describe a mistake in a command line in one line."""
    if isinstance(error, UnusedCliTokensError):
        return f"unexpected argument {shown((error.unused_tokens or [''])[0])}"
    if isinstance(error, MissingArgumentError) and error.argument:
        name = error.argument.name
        return f"{name} requires a value" if name.startswith("-") else f"{name} is missing"
    message = " ".join(str(error).split())
    return message[:1].lower() + message[1:]


def _refuse(error: BaseException) -> None:
    raise error


def _app(words: Sequence[str]) -> App:
    """Return the application. Only the module of the called command is imported."""
    width = min(110, shutil.get_terminal_size((100, 24)).columns)
    shows_help = not words or set(HELP) & set(words)
    app = App(
        name="recast", help=ABOUT, usage="recast COMMAND [options]", help_format="plaintext", help_epilogue=END,
        help_formatter=Columns(width), help_flags=HELP, version=f"recast {__version__}",
        console=_console(width) if shows_help else None,
    )  # fmt: skip
    for name, text in COMMANDS.items():
        path = f"recast.lab.cli.{name}{'_' * iskeyword(name)}"
        if words[:1] == [name]:
            app.command(importlib.import_module(path).COMMAND.app(words[1:]), name=name)
        else:
            app.command(f"{path}:COMMAND", name=name, help=text, sort_key=len(app._commands))
    app.register_install_completion_command(add_to_startup=False, help="complete with TAB in this shell")
    return app


def _console(width: int) -> Console:
    from rich.console import Console  # takes longer than a plain option is read

    return Console(width=2 * width)  # examples are not wrapped


def _run(call: Callable[[], Any], name: str, verbose: bool) -> int:
    try:
        return int(call() or 0)
    except RecastError as error:
        return 2 if error.already_told else _complain(name, f"error: {error}", error, verbose)
    except KeyboardInterrupt as error:
        if later_process():  # the first one says it
            return 130
        return complain(f"recast {name}".strip(), str(error) or "interrupted", 130)
    except BaseException as error:  # a user's module may raise SystemExit, GeneratorExit or a kind of its own
        return _complain(name, f"error: {describe_error(error)}", error, verbose)


def _complain(name: str, message: str, error: BaseException, verbose: bool) -> int:
    if verbose:
        traceback.print_exception(error)
    return complain(f"recast {name}".strip(), message)


@contextmanager
def _one_line_warnings() -> Iterator[None]:
    """Print warnings as one line on stderr, without their place in the code."""

    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        print(f"note: {one_line(message)}", file=sys.stderr)

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield
