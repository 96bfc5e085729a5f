"""Everything that needs a GPU, in one command that can be stopped and goes on: exactness, speed, and the studies.

    python benchmarks/gpu --out runs/gpu --data DIR              # 20 minutes at most; again: what is left
    python benchmarks/gpu --out runs/gpu --parts speed --minutes 9
    python benchmarks/gpu --out runs/toy --toy                   # a rehearsal on the CPU in half a minute

exactness   checks.py, 4 minutes at most → exactness.csv
speed       speed.py, 6 minutes at most → speed.csv
evidence    studies/evidence --scale gpu with the time that is left → evidence_runs/ and the tables evidence*.csv;
            needs $RECAST_DATA or --data. The folder evidence/ is made again from evidence_runs/ where it is missing,
            so the rest of --out is all that has to go to another machine.

Exit status: 1 if anything failed, 2 without a GPU. A part whose time ran out has not failed: call again. Rows that
failed are measured again, those that passed are kept; for another version of the code give another --out.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import shlex
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rows import UNFINISHED, read

HERE = Path(__file__).resolve().parent
MINUTES = {"exactness": 4.0, "speed": 6.0}
SCRIPTS = {"exactness": HERE / "checks.py", "speed": HERE / "speed.py"}
PARTS = (*SCRIPTS, "evidence")
SPARE = 0.2
"""Share of a part's time in which it starts nothing new."""
COLLECTING = 30.0
"""Seconds that the tables of a study that was stopped take."""
TOY = "--scale cpu --workers 1 --study a-cifar100-cifar10-4000 --seeds 2 --few 10 --updates 3 --num-train 20"
TOY += " --arms fine-tuned 'recast, zero'"


def gpu() -> str:
    """Its name and torch's version; ends the program where there is none."""
    import torch

    if not torch.cuda.is_available():
        print("no GPU that torch can use here: --toy rehearses on the CPU", file=sys.stderr)
        raise SystemExit(2)
    return f"{torch.cuda.get_device_name()}, torch {torch.__version__}"


def call(command: list[str], seconds: float, environment: Mapping[str, str]) -> int | None:
    """Exit status of a command in a process group of its own; None where it ran out of time and was ended."""
    process = subprocess.Popen(command, env={**os.environ, **environment}, start_new_session=True)
    try:
        return process.wait(max(1.0, seconds))
    except subprocess.TimeoutExpired:
        return None
    finally:
        for how in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(process.pid, how)
                process.wait(5)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                pass


def rehearse(command: list[str], _seconds: float, environment: Mapping[str, str]) -> int:
    """Exit status of the same command in this process, which imports torch once for all parts."""
    os.environ.update(environment)
    sys.argv = command[1:]
    sys.path[:0] = [str(Path(sys.argv[0]).parent), *environment["PYTHONPATH"].split(os.pathsep)]
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except Exception:
        traceback.print_exc()
        return 1
    return 0


def measure(part: str, out: Path, seconds: float, toy: bool, environment: Mapping[str, str]) -> str:
    """Exactness or speed; returns its state. ValueError for a file of results that it cannot go on from."""
    read(out / f"{part}.csv")
    command = [sys.executable, str(SCRIPTS[part]), str(out / f"{part}.csv"), str((1 - SPARE) * seconds)]
    run = rehearse if toy else call
    status = run([*command, *(("cpu", "--toy") if toy else ("cuda",))], seconds, environment)
    if status is None:
        print(f"{part}: ended after {seconds:.0f} s within the unit that follows the last line above", flush=True)
    return {0: "passed", UNFINISHED: "unfinished"}.get(-1 if status is None else status, "failed")


def study(out: Path, data: Path, seconds: float, chosen: str, toy: bool, environment: Mapping[str, str]) -> str:
    """The runs, as far as the time goes."""
    command = [
        sys.executable,
        str(HERE.parents[1] / "studies" / "evidence"),
        "--out",
        str(out / "evidence"),
        "--results",
        str(out),
    ]
    command += shlex.split(TOY if toy else f"--scale gpu {chosen}")
    environment = {**environment, "RECAST_DATA": str(data)}
    status = (rehearse if toy else call)(command, seconds - COLLECTING, environment)
    if status is None:
        call([*command, "--collect"], COLLECTING, environment)
    return {0: "passed", None: "unfinished"}.get(status, "failed")


def table(parts: Mapping[str, Mapping[str, Any]], out: Path) -> str:
    """What became of each part, and every row that failed."""
    lines, wrong = [f"{'part':12}{'state':12}{'seconds':>8}{'rows':>7}{'failed':>8}"], []
    for part, found in parts.items():
        counts = ""
        if part in SCRIPTS and not found["unreadable"]:
            rows = read(out / f"{part}.csv")
            bad = [each for each in rows if each["state"] == "failed"]
            counts = f"{len(rows):7}{len(bad):8}"
            wrong += [f"  {part}: " + ", ".join(each.values()) for each in bad]
        lines.append(f"{part:12}{found['state']:12}{found['seconds']:8.0f}{counts:15}  {found['note']}".rstrip())
    return "\n".join([*lines, *wrong])


def main() -> int:
    """All parts in turn."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], epilog="\n".join(__doc__.splitlines()[1:]))
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--out", type=Path, required=True, help="folder of the results; goes on where it was stopped")
    parser.add_argument("--data", type=Path, default=os.environ.get("RECAST_DATA"), help="default: $RECAST_DATA")
    parser.add_argument("--minutes", type=float, default=20.0, help="all parts are ended after so long")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--evidence", default="", help="options for studies/evidence, in one string: '--study NAME'")
    parser.add_argument("--toy", action="store_true", help="a rehearsal on the CPU")
    options = parser.parse_args()
    until = time.monotonic() + 60 * options.minutes
    machine = "toy" if options.toy else gpu()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that `call` ends what it started
    options.out.mkdir(parents=True, exist_ok=True)
    summary = options.out / "parts.json"
    known = json.loads(summary.read_text()) if summary.is_file() else {"machine": machine, "parts": {}}
    if known["machine"] != machine:
        print(f"{options.out} has results of {known['machine']}, here is {machine}: another --out", file=sys.stderr)
        return 2
    paths = [HERE.parents[1] / "src", HERE.parent, HERE.parents[1] / "tests", os.environ.get("PYTHONPATH", "")]
    environment = {"PYTHONPATH": os.pathsep.join(str(path) for path in paths if str(path)), "PYTHONUNBUFFERED": "1"}
    for part in options.parts:
        chosen, before = options.evidence if part == "evidence" else "", known["parts"].get(part, {})
        if before.get("state") == "passed" and before["options"] == chosen:
            before["note"] = "from an earlier call"
            continue
        started = time.monotonic()
        left = min(60 * MINUTES.get(part, options.minutes), until - started)
        note, unreadable = "", False
        if part == "evidence" and options.data is None:
            state, note = "skipped", "RECAST_DATA or --data must name the folder of cifar10/ and weights/"
        elif left < (2 * COLLECTING if part == "evidence" else 1):
            state, note = "unfinished", "no time was left: the same command goes on"
        elif part == "evidence":
            state = study(options.out, options.data, left, chosen, options.toy, environment)
        else:
            try:
                state = measure(part, options.out, left, options.toy, environment)
            except ValueError as error:
                state, note, unreadable = "failed", str(error), True
        if state == "unfinished":
            note = note or "its time ran out: the same command goes on"
        seconds = round(time.monotonic() - started, 1)
        known["parts"][part] = {
            "state": state, "seconds": seconds, "note": note, "options": chosen, "unreadable": unreadable,
        }  # fmt: skip
        summary.write_text(json.dumps(known, indent=1))
    print(machine, table({part: known["parts"][part] for part in options.parts}, options.out), sep="\n")
    return int(any(known["parts"][part]["state"] == "failed" for part in options.parts))


if __name__ == "__main__":
    sys.exit(main())
