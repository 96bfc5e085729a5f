"""The command `recast`: a thin layer over the library. A command's module is imported when it is called.

Exit codes: 0 done, 1 the check that was asked for failed (`verify`), 2 a mistake in the request, 130 interrupted.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from recast import __version__
from recast.errors import RecastError, suggest

COMMANDS = {
    "quickstart": "the whole story on embedded data: train a CNN, recast it, train on, evaluate, report",
    "plan": "what of a model would become attention, at what cost, and why the rest stays",
    "verify": "recast a model and compare it with its parent, layer by layer and end to end",
    "train": "recast a parent by a recipe and train on, beside the parent trained the same way",
    "evaluate": "measure the arms of a run: accuracy, attacks, corruptions, cost",
    "report": "one HTML page of one or several runs",
}

USAGE = (
    "usage: recast COMMAND [options]\n\n"
    "Recast the convolutions of a trained network as gated positional self-attention,\n"
    "without changing what it computes; then train on.\n\ncommands:\n"
    + "".join(f"  {name:<12}{text}\n" for name, text in COMMANDS.items())
    + "\n  recast COMMAND --help   options and examples of a command\n"
    "  recast --version        version\n\nstart here:  recast quickstart\n"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(USAGE, end="")
        return 0
    if arguments[0] == "--version":
        print(f"recast {__version__}")
        return 0
    name, *rest = arguments
    if name not in COMMANDS:
        return _complain(
            "recast", f"unknown command {name!r}: expected {', '.join(COMMANDS)}.{suggest(name, COMMANDS)}"
        )
    try:
        command = importlib.import_module(f"recast.cli.{name}")
        return int(command.run(rest))
    except (RecastError, argparse.ArgumentError) as error:
        code = getattr(error, "exit_code", 2)
        return _complain(f"recast {name}", " ".join(str(error).split()), code)
    except KeyboardInterrupt as error:
        return _complain(f"recast {name}", " ".join(str(error).split()) or "interrupted", 130)
    except BrokenPipeError:  # the reader of a pipe has gone: nothing more to say
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _complain(who: str, message: str, code: int = 2) -> int:
    label = "" if code == 130 else "error: "
    print(f"{who}: {label}{message}", file=sys.stderr)
    return code
