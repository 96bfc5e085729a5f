"""`python -m recast`: the command, for torchrun (`torchrun -m recast train ...`) and for Python without scripts."""

from __future__ import annotations

import sys

from recast.cli import main

sys.exit(main())
