"""The command `recast`: a thin layer over the library. A command's module is imported when it is called.

Exit codes: 0 done, 1 the check that was asked for failed (`verify`, `check`), 2 a mistake in the request, 130
interrupted.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from keyword import iskeyword
from typing import Any

from recast import __version__
from recast.errors import RecastError, one_line, shown, suggest
from recast.lab.cli.guard import COMPLETE, HelpShown, asks_for, complain, describe, guarded_streams, later_process
from recast.lab.signals import calm_ctrl_c

COMMANDS = {
    "quickstart": "the whole story on embedded data: train a CNN, recast it, train on, evaluate, report",
    "try": "will attention help on my images? an answer in minutes, before a full training",
    "plan": "what of a model would become attention, at what cost, and why the rest stays",
    "verify": "recast a model and compare it with its parent, layer by layer and end to end",
    "train": "recast a parent by a recipe and train on, beside the parent trained the same way",
    "evaluate": "measure the arms of a run: accuracy, attacks, corruptions, cost",
    "explain": "see where a run, or any network, looks in an image: a page to click, maps of classes, a PNG",
    "fold": "a trained network in its smallest form; heads closed one by one, accuracy against milliseconds",
    "check": "verify again what a saved file says of itself: weights, plan, parent, folds, exports",
    "export": "write a run or a saved network as ONNX or a program of torch.export, and check the file",
    "report": "one HTML page of one or several runs",
}

USAGE = (
    "usage: recast COMMAND [options]\n\n"
    "Recast the convolutions of a trained network as gated positional self-attention,\n"
    "without changing what it computes; then train on.\n\ncommands:\n"
    + "".join(f"  {name:<12}{text}\n" for name, text in COMMANDS.items())
    + "\n  recast COMMAND --help   options and examples of a command\n"
    "  recast --version        version\n"
    '  eval "$(recast --completion)"   TAB completes commands, options and their words: bash, zsh\n'
    "\nstart here:  recast quickstart\n"
)
COMPLETION = f"""_recast() {{
  local IFS=$'\\n'
  COMPREPLY=($({COMPLETE}="${{COMP_WORDS[COMP_CWORD]}}" "${{COMP_WORDS[@]:0:COMP_CWORD}}" 2>/dev/null))
}}
[ -n "${{ZSH_VERSION-}}" ] && autoload -U +X compinit bashcompinit && compinit && bashcompinit
complete -o default -F _recast recast
"""
"""The shell asks the command itself, with the words so far; it takes a file's name where nothing fits."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    json, quiet = (asks_for(option, arguments) for option in ("--json", "--quiet"))
    with guarded_streams(json, quiet) as out, _one_line_warnings(), calm_ctrl_c():
        code = _run(arguments)
        out.flush()  # a pipe whose reader has gone says so here, not at the interpreter's exit
        trains = arguments[:1] in (["train"], ["quickstart"])  # and left its results in files
        if not (code or trains or out.failed is None or isinstance(out.failed, BrokenPipeError)):
            code = complain("recast", f"error: standard output: {out.failed.strerror}")
    if argv is None:  # what a user's module does at the interpreter's exit is neither interrupted nor a result
        with suppress(OSError, ValueError):
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            os.dup2(2, 1)
    return code


def _run(arguments: list[str]) -> int:
    if not arguments and (begun := os.environ.get(COMPLETE)) is not None:
        print("\n".join(name for name in COMMANDS if name.startswith(begun)))
        return 0
    if arguments[:1] == ["help"] and len(arguments) > 1:
        arguments = [arguments[1], "--help"]
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(USAGE, end="")
        return 0
    if arguments[0] == "--version":
        print(f"recast {__version__}")
        return 0
    if arguments[0] == "--completion":
        print(COMPLETION, end="")
        return 0
    name, *rest = arguments
    if name not in COMMANDS:
        known = ", ".join(COMMANDS)
        return complain("recast", f"error: unknown command {shown(name)}: expected {known}.{suggest(name, COMMANDS)}")
    try:
        _check_here()
        module = f"{name}_" if iskeyword(name) else name
        return int(importlib.import_module(f"recast.lab.cli.{module}").run(rest))
    except RecastError as error:
        _show_where(error, rest)
        return 2 if error.already_told else complain(f"recast {name}", f"error: {error}")
    except KeyboardInterrupt as error:
        if later_process():  # the first one says it
            return 130
        return complain(f"recast {name}", str(error) or "interrupted", 130)
    except HelpShown:
        return 0
    except BaseException as error:  # a user's module may raise SystemExit, GeneratorExit or a kind of its own
        _show_where(error, rest)
        return complain(f"recast {name}", f"error: {describe(error)}")


def _show_where(error: BaseException, arguments: list[str]) -> None:
    if asks_for("--verbose", arguments):
        traceback.print_exception(error)


def _check_here() -> None:
    try:
        os.getcwd()
    except OSError:
        raise RecastError("the current folder was deleted: go to another one (cd)") from None


@contextmanager
def _one_line_warnings() -> Iterator[None]:
    """Warnings as one line on stderr, without the place in the code that they come from."""

    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        print(f"note: {one_line(message)}", file=sys.stderr)

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield
