"""Every convnet of timm and torchvision: recast exactly?

    python benchmarks/zoo.py                  # writes results/zoo.csv; goes on where it was stopped

The command is `recast zoo --out results/zoo.csv --workers 2`; `recast.lab.zoo.rows.ZooRow` says what the columns are.
"""

from __future__ import annotations

import sys
from pathlib import Path

from recast.lab.cli.zoo import run

if __name__ == "__main__":
    result = Path(__file__).parents[1] / "results" / "zoo.csv"
    sys.exit(run([*sys.argv[1:], "--out", str(result), "--workers", "2"]))
