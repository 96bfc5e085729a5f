"""`python -m recast`: the command, for torchrun (`torchrun -m recast train ...`) and for Python without scripts."""

from __future__ import annotations

import os
import sys
from contextlib import suppress

with suppress(OSError):  # the current folder was deleted
    if not sys.flags.safe_path and os.path.realpath(sys.path[0]) == os.path.realpath(os.getcwd()):
        del sys.path[0]  # -m puts the current folder first, where a downloaded yaml.py would be taken for the real one

from recast.lab.cli import main

sys.exit(main())
