"""Everything that needs a GPU, in one command that continues where it was stopped: exactness, speed, and the studies.

    python benchmarks/gpu --out runs/gpu --data DIR              # at most 20 minutes; call again to continue
    python benchmarks/gpu --out runs/gpu --parts speed --minutes 9
    python benchmarks/gpu --out runs/toy --toy                   # a rehearsal on the CPU in a minute

exactness   checks.py, at most 4 minutes → exactness.csv
speed       speed.py, at most 6 minutes → speed.csv
evidence    studies/evidence --device cuda in the remaining time → evidence_runs/ and the tables evidence*.csv;
            needs $RECAST_DATA or --data. A missing folder evidence/ is restored from evidence_runs/, so only the rest
            of --out has to go to another machine.

Exit status: 1 if anything failed, 2 without a GPU. A part whose time ran out has not failed: call again. Failed rows
are measured again, passed ones are kept. For another version of the code use another --out.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import torch
from part import UNFINISHED, read

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
MINUTES = {"exactness": 4.0, "speed": 6.0}
SCRIPTS = {"exactness": HERE / "checks.py", "speed": HERE / "speed.py"}
PARTS = (*SCRIPTS, "evidence")
SPARE = 0.2
"""Share of a part's time in which it starts nothing new."""
COLLECTING = 30.0
"""Seconds for the tables of a study that was stopped."""
TOY = "--workers 1 --study a-cifar100-cifar10-4000 --seeds 2 --few 10 --updates 3 --num-train 20"
TOY += " --arms fine-tuned 'recast, zero'"


def call(command: list[str], seconds: float, environment: Mapping[str, str]) -> int | None:
    """Run a command in its own process group; return its exit status, None if its time ran out."""
    process = subprocess.Popen([sys.executable, *command], env={**os.environ, **environment}, start_new_session=True)
    try:
        return process.wait(max(1.0, seconds))
    except subprocess.TimeoutExpired:
        return None
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(process.pid, number)
                process.wait(5)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                pass


def carry_out(
    part: str, options: argparse.Namespace, seconds: float, environment: Mapping[str, str]
) -> tuple[str, str]:
    """Run a part; return its state and a note."""
    if part == "evidence" and options.data is None:
        return "skipped", "RECAST_DATA or --data must name the folder of cifar10/ and weights/"
    if seconds < (2 * COLLECTING if part == "evidence" else 1):
        return "unfinished", "no time was left; the same command continues"
    if part == "evidence":
        command = [str(ROOT / "studies" / "evidence"), "--out", str(options.out / "evidence")]
        command += ["--results", str(options.out), *shlex.split(TOY if options.toy else options.evidence)]
        command += [] if options.toy else ["--device", "cuda"]
        status = call(command, seconds - COLLECTING, environment)
        if status is None:
            call([*command, "--collect"], COLLECTING, environment)
            status = UNFINISHED
    else:
        command = [str(SCRIPTS[part]), str(options.out / f"{part}.csv"), str((1 - SPARE) * seconds)]
        status = call([*command, *(("cpu", "--toy") if options.toy else ("cuda",))], seconds, environment)
    if status is None:
        return "failed", f"ended after {seconds:.0f} s in the unit after the last line above"
    if status == UNFINISHED:
        return "unfinished", "its time ran out; the same command continues"
    return "failed" if status else "passed", ""


def main() -> int:
    """Run all parts in turn."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], epilog="\n".join(__doc__.splitlines()[1:]))
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--out", type=Path, required=True, help="folder of the results; continues where it was stopped")
    parser.add_argument("--data", type=Path, default=os.environ.get("RECAST_DATA"), help="default: $RECAST_DATA")
    parser.add_argument("--minutes", type=float, default=20.0, help="time for all parts together")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--evidence", default="", help="options for studies/evidence, in one string: '--study NAME'")
    parser.add_argument("--toy", action="store_true", help="rehearse on the CPU")
    options = parser.parse_args()
    until = time.monotonic() + 60 * options.minutes
    if not options.toy and not torch.cuda.is_available():
        parser.error("no GPU that torch can use; --toy rehearses on the CPU")
    machine = "toy" if options.toy else f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that `call` ends its process
    options.out.mkdir(parents=True, exist_ok=True)
    machine_file = options.out / "machine.txt"
    before = machine_file.read_text() if machine_file.is_file() else machine
    if before != machine:
        parser.error(f"{options.out} has results of {before}, this is {machine}: give another --out")
    machine_file.write_text(machine)
    try:
        for part in SCRIPTS:
            read(options.out / f"{part}.csv")
    except ValueError as error:
        parser.error(str(error))
    paths = [ROOT / "src", HERE.parent, ROOT / "tests", os.environ.get("PYTHONPATH", "")]
    environment = {"PYTHONPATH": os.pathsep.join(str(path) for path in paths if str(path)), "PYTHONUNBUFFERED": "1"}
    environment |= {"RECAST_DATA": str(options.data)} if options.data else {}
    results = {}
    for part in options.parts:
        seconds = min(60 * MINUTES.get(part, options.minutes), until - time.monotonic())
        results[part] = carry_out(part, options, seconds, environment)
    print(*(f"{part}: {state}. {note}".rstrip() for part, (state, note) in results.items()), sep="\n")
    return int(any(state == "failed" for state, _ in results.values()))


if __name__ == "__main__":
    sys.exit(main())
