"""The command: `recast`, and `python -m recast` for torchrun and for Python without scripts."""

from __future__ import annotations

import os
import sys
from contextlib import suppress


def main() -> int:
    """Run the command line with the papers' networks, settings and recipes."""
    from recast.lab.cli import main as run

    return run(extend=_add_papers)


def _add_papers() -> None:
    import recast.papers  # noqa: F401


if __name__ == "__main__":
    with suppress(OSError):  # the current folder was deleted
        if not sys.flags.safe_path and os.path.realpath(sys.path[0]) == os.path.realpath(os.getcwd()):
            # -m puts the current folder first, where a downloaded yaml.py would be taken for the real one
            del sys.path[0]
    sys.exit(main())
