"""What becomes of runs that are contested, interrupted, unheard, out of disk or damaged: does each end as promised?

    python benchmarks/durable.py                      # writes results/durable.csv; twenty minutes on a CPU
    python benchmarks/durable.py --only writers disk  # some of it; the other rows stay

Each case is the command itself in a process of its own, forked so that nothing is imported again. A case passes if
the command ends as it should (its exit code, at most one line of complaint, no traceback, no hang), and if what is
promised holds: the resumed run has the bits of one that was never disturbed, and nothing is left over. Linux only.
`resume.py` kills runs.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import faulthandler
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from timing import RESULTS, write_table

from recast.cli import main as recast_main
from recast.run import files
from recast.run.records import Row
from recast.run.tables import read_records
from recast.training.checkpoint import states
from recast.training.metrics import read_metrics

RESULT = RESULTS / "durable.csv"
TRAIN = ["train", "digits", *"--img-size 8 --num-train 80 --num-val 30 --batch-size 20 --epochs 3 --keep-every 1 "
         "--no-control --save-steps 2 --warmup-epochs 0 --device cpu".split()]  # fmt: skip
LIMIT = 300
"""Seconds; what takes longer hangs."""
SCRATCH = Path()
"""The folder of this call; `main` makes it."""
NUMBERS = count()


class Ended(NamedTuple):
    code: int
    """Of the command; minus a signal that ended it."""
    out: str
    err: str

    @property
    def complaint(self) -> str:
        """What is wrong with how it spoke: a traceback, or an error that is not one line; empty if nothing is."""
        errors = [line for line in self.err.splitlines() if "error: " in line]
        if "Traceback" in self.err:
            return f"a traceback: {self.err.strip().splitlines()[-1]}"
        if self.code < 0:
            return f"ended by signal {-self.code}: {self.err[-1500:]}"
        if self.code == 2 and len(errors) != 1:
            return f"{len(errors)} lines of error"
        return ""


class Process:
    """`recast WORDS` in a fork; `before` is called in it first."""

    def __init__(self, words: list[str], before: Callable[[], object] = lambda: None) -> None:
        self.files = [tempfile.TemporaryFile(dir=SCRATCH) for _ in range(2)]
        self.child = os.fork()
        if self.child == 0:
            os.setsid()
            for number, file in enumerate(self.files, start=1):
                os.dup2(file.fileno(), number)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            faulthandler.enable(file=2)
            # torch makes its pool of threads anew in the first thread that asks for it; where two threads of a forked
            # process ask at once, the second finds none and aborts ("Invalid thread pool!")
            torch.set_num_threads(torch.get_num_threads())
            before()
            sys.stdout, sys.stderr = _stream(1), _stream(2)
            os._exit(_flushed(recast_main(words)))

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.child, number)

    def wait(self) -> Ended:
        """How it ended; what hangs is killed."""
        until = time.monotonic() + LIMIT
        while not (found := os.waitpid(self.child, os.WNOHANG))[0]:
            if time.monotonic() > until:
                os.killpg(self.child, signal.SIGKILL)
                os.waitpid(self.child, 0)
                return Ended(-signal.SIGKILL, "", "hangs")
            time.sleep(0.01)
        texts = []
        for file in self.files:
            file.seek(0)
            texts.append(file.read().decode("utf-8", "replace"))
            file.close()
        return Ended(os.waitstatus_to_exitcode(found[1]), *texts)


def _stream(number: int) -> Any:
    """As Python makes it at its start."""
    try:
        return open(number, "w", closefd=False)
    except OSError:
        return None


def _flushed(code: int) -> int:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, AttributeError):
            stream.flush()
    return code


def call(*words: str | Path, before: Callable[[], object] = lambda: None) -> Ended:
    return Process([*map(str, words)], before).wait()


def train(out: Path, *words: str, before: Callable[[], object] = lambda: None) -> Ended:
    return call(*TRAIN, "--out", out, *words, before=before)


# --- what is promised -------------------------------------------------------------------------------------------------


def straight() -> Path:
    """A run that nothing disturbed; made once."""
    out = SCRATCH / "straight"
    if not out.exists():
        ended = train(out)
        assert ended.code == 0, ended.err
    return out


def stopped(name: str) -> Path:
    """A run that was told to stop in its second epoch, copied."""
    made = SCRATCH / "stopped"
    if not made.exists():
        ended = train(made, before=lambda: at_rows(made, 2, signal.SIGTERM))
        assert ended.code == 130, ended.err
    return Path(shutil.copytree(made, SCRATCH / name))


def at_rows(out: Path, count: int, number: int) -> None:
    """Send this process a signal once metrics.jsonl has so many rows."""

    def watch() -> None:
        path = out / "metrics.jsonl"
        while not (path.is_file() and path.read_bytes().count(b"\n") >= count):
            time.sleep(0.002)
        os.kill(os.getpid(), number)

    threading.Thread(target=watch, daemon=True).start()


def wrong_with(out: Path) -> str:
    """What is wrong with the folder of a finished run: other bits than the straight one's, or files left over."""
    for name in sorted(path.relative_to(straight()) for path in straight().rglob("*.safetensors")):
        if not (out / name).is_file():
            return f"{name} is missing"
        one, other = load_file(straight() / name), load_file(out / name)
        if any(not torch.equal(value, other[key]) for key, value in one.items()):
            return f"{name} has other bits"
    rows = [sorted(row["epoch"] for row in read_metrics(run / "metrics.jsonl")) for run in (straight(), out)]
    left = [path.name for path in out.rglob(".*")]
    return f"left over: {', '.join(left)}" if left else "" if rows[0] == rows[1] else f"has epochs {rows[1]}"


def goes_on(out: Path, told: str = "") -> str:
    """What is wrong with the run after `--resume auto`, which must say `told`."""
    ended = train(out, "--resume", "auto")
    if ended.code or ended.complaint:
        return f"resumed: exit {ended.code}: {ended.complaint or ended.err[-300:]}"
    if told not in ended.err:
        return f"resumed without saying {told!r}: {ended.err[-300:]}"
    return wrong_with(out)


# --- two writers ------------------------------------------------------------------------------------------------------


def two(commands: list[list[str]], chance: random.Random) -> str:
    """Start two commands on one folder a moment apart: one must do its work, the other be refused in one line."""
    processes = []
    for words in commands:
        processes.append(Process(words))
        time.sleep(chance.choice([0.0, 0.0, chance.uniform(0.0, 0.2)]))
    done, refused = sorted((process.wait() for process in processes), key=lambda one: one.code)
    if done.complaint or refused.complaint or (done.code, refused.code) != (0, 2):
        return f"exits {done.code}, {refused.code}: {done.complaint} {refused.err[-300:]}"
    return "" if " is in use by process " in refused.err else f"refused otherwise: {refused.err}"


def two_trains(chance: random.Random) -> str:
    out = fresh()
    return two([[*TRAIN, "--out", str(out)]] * 2, chance) or wrong_with(out)


def two_resumes(chance: random.Random) -> str:
    out = stopped(fresh().name)
    return two([["train", "--resume", str(out)]] * 2, chance) or wrong_with(out)


def two_evaluates(chance: random.Random) -> str:
    out = Path(shutil.copytree(straight(), fresh()))
    suites = ["clean", "fgsm"]
    found = two([["evaluate", str(out), "--suite", suite] for suite in suites], chance)
    if found:
        return found
    again = call("evaluate", out, "--suite", ",".join(suites))
    rows = {row.suite for row in read_records(out / "rows.csv", Row)}
    return again.complaint or ("" if rows == set(suites) else f"rows of {rows}")


# --- signals ----------------------------------------------------------------------------------------------------------


def signalled(chance: random.Random, numbers: list[int], from_start: bool) -> str:
    """Signals a few milliseconds apart, at a random moment of the run, or of its training."""
    out = fresh()
    process, log = Process([*TRAIN, "--out", str(out)]), out / "metrics.jsonl"
    while not (from_start or log.is_file()):
        time.sleep(0.005)
    time.sleep(chance.uniform(0.0, 2.0 if from_start else 0.8))
    for number in numbers:
        process.signal(number)
        time.sleep(chance.choice([0.0, 0.001, 0.01, 0.05]))
    ended = process.wait()
    if ended.complaint or ended.code not in (0, 130):
        return f"exit {ended.code}: {ended.complaint}"
    if ended.code == 130 and not from_start and "state saved" not in ended.err:
        return f"nothing saved: {ended.err[-200:]}"
    if left := [path.name for path in out.rglob(".*")]:
        return f"left over: {', '.join(left)}"
    return goes_on(out)


# --- streams ----------------------------------------------------------------------------------------------------------


def unheard(numbers: tuple[int, ...], how: str) -> str:
    """Train where standard output (1) or error (2) is a pipe that nobody reads, a full disk, or closed."""

    def spoil() -> None:
        for number in numbers:
            if how == "closed":
                os.close(number)
                continue
            end = os.open("/dev/full", os.O_WRONLY) if how == "full" else _pipe_without_reader()
            os.dup2(end, number)

    out = fresh()
    ended = train(out, before=spoil)
    if ended.code or ended.complaint:
        return f"exit {ended.code}: {ended.complaint}"
    if (1 in numbers and ended.out) or (2 in numbers and ended.err):
        return "it was heard"
    return wrong_with(out)


def _pipe_without_reader() -> int:
    reading, writing = os.pipe()
    os.close(reading)
    return writing


# --- full disks -------------------------------------------------------------------------------------------------------


def full_disk(room: int) -> str:
    """Train on a file system of so many bytes, then with room enough."""
    disk = fresh()
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={room}", "none", disk], check=True)
    try:
        out = disk / "run"
        ended = train(out)
        if ended.complaint or ended.code not in (0, 2):
            return f"exit {ended.code}: {ended.complaint}"
        subprocess.run(["mount", "-o", f"remount,size={2**26}", disk], check=True)
        return goes_on(out)
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


def large_files(limit: int) -> str:
    """Train where no file may be larger, as on a full disk (needs no root), then where it may."""
    out = fresh()
    ended = train(out, before=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY)))
    if ended.complaint or ended.code not in (0, 2):
        return f"exit {ended.code}: {ended.complaint}"
    if ended.code == 2 and not any(word in ended.err for word in ("cannot save", "cannot write", "too large", "space")):
        return f"told otherwise: {ended.err[-300:]}"
    return goes_on(out)


# --- killed early -----------------------------------------------------------------------------------------------------


def killed_at_file(calls: int) -> str:
    """Kill a run as its n-th file takes its name, before a state is there: the same command starts again."""
    out = fresh()

    def arm() -> None:
        replace, seen = os.replace, []

        def last(*names: Any) -> None:
            seen.append(names)
            if len(seen) > calls:
                os.kill(os.getpid(), signal.SIGKILL)
            replace(*names)

        files.os.replace = last  # type: ignore[assignment]

    ended = train(out, before=arm)
    return goes_on(out) if ended.code == -signal.SIGKILL else f"exit {ended.code}: it was not killed"


# --- damage -----------------------------------------------------------------------------------------------------------


def flip(path: Path, chance: random.Random) -> None:
    """Flip one bit."""
    content = bytearray(path.read_bytes())
    content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    path.write_bytes(content)


def flipped_state(chance: random.Random) -> str:
    out = stopped(fresh().name)
    flip(states(out)[-1], chance)
    return goes_on(out)


def all_states_flipped(chance: random.Random) -> str:
    out = stopped(fresh().name)
    for path in states(out):
        path.write_bytes(path.read_bytes()[: chance.randrange(path.stat().st_size)])
    ended = train(out, "--resume", "auto")
    fits = ended.code == 2 and "holds no whole state" in ended.err and not ended.complaint
    return "" if fits else f"exit {ended.code}: {ended.complaint} {ended.err[-300:]}"


def flipped_weights(chance: random.Random, name: str) -> str:
    """Every command that reads them refuses, in a line that names the file; or reads what it always read."""
    out = Path(shutil.copytree(straight(), fresh()))
    flip(out / name, chance)
    ended = call("evaluate", out, "--suite", "clean,heads")
    if ended.code == 0 and "damaged" not in ended.err:
        one, other = load_file(out / name), load_file(straight() / name)
        same = all(torch.equal(value, one[key]) for key, value in other.items())
        return "" if same else "evaluated with other weights"
    fits = Path(name).name in ended.err and not ended.complaint
    return "" if fits else f"exit {ended.code}: {ended.complaint} {ended.err[-300:]}"


def flipped_scores(chance: random.Random) -> str:
    out = Path(shutil.copytree(straight(), fresh()))
    call("evaluate", out, "--suite", "clean")
    rows = (out / "rows.csv").read_bytes()
    flip(chance.choice(sorted((out / "scores").rglob("*.npz"))), chance)
    ended = call("evaluate", out, "--suite", "clean")
    if ended.code or ended.complaint:
        return f"exit {ended.code}: {ended.complaint}"
    return "" if (out / "rows.csv").read_bytes() == rows else "other rows"


def no_checkpoints(_: random.Random) -> str:
    out = stopped(fresh().name)
    shutil.rmtree(out / "checkpoints")
    ended = train(out, "--resume", "auto")
    told = "has lost checkpoints/epoch-0000.safetensors" in ended.err
    if ended.code or ended.complaint or not told:
        return f"exit {ended.code}: {ended.complaint} {ended.err[-300:]}"
    shutil.copytree(straight() / "checkpoints", out / "checkpoints", dirs_exist_ok=True)
    return wrong_with(out)


def foreign_state(_: random.Random) -> str:
    out = stopped(fresh().name)
    shutil.copy(states(straight())[-1], out / "resume")
    return goes_on(out, "is of another run than metrics.jsonl: passed over")


def bad_line(chance: random.Random) -> str:
    out = stopped(fresh().name)
    lines = (out / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    lines.insert(chance.randrange(len(lines) + 1), chance.choice([b"\xff\x00\n", b"{\n", b"[1]\n", b"{}\n"]))
    (out / "metrics.jsonl").write_bytes(b"".join(lines))
    return goes_on(out)


# --- all of it --------------------------------------------------------------------------------------------------------


def fresh() -> Path:
    """A folder that is not there yet."""
    return SCRATCH / f"{next(NUMBERS)}"


def cases() -> Iterator[tuple[str, str, int, Callable[[random.Random], str]]]:
    """Class, case, how often, and what is done; it returns what went wrong."""
    yield "writers", "two train on one folder", 20, two_trains
    yield "writers", "two train --resume of one run", 20, two_resumes
    yield "writers", "two evaluate of one run", 20, two_evaluates
    for name in ("SIGHUP", "SIGTERM"):
        yield (
            "signals",
            f"{name} while it trains",
            6,
            partial(signalled, numbers=[getattr(signal, name)], from_start=False),
        )
    yield "signals", "six SIGINT while it trains", 10, partial(signalled, numbers=6 * [signal.SIGINT], from_start=False)
    yield "signals", "six SIGINT at any moment", 10, partial(signalled, numbers=6 * [signal.SIGINT], from_start=True)
    for how in ("pipe", "full", "closed"):
        for numbers in ((1,), (2,), (1, 2)):
            told = " and ".join({1: "stdout", 2: "stderr"}[number] for number in numbers)
            what = {"pipe": "a pipe without reader", "full": "/dev/full", "closed": "closed"}[how]
            yield "streams", f"{told}: {what}", 1, lambda _, numbers=numbers, how=how: unheard(numbers, how)
    whole = sum(path.stat().st_size for path in straight().rglob("*") if path.is_file())
    if os.geteuid() == 0:
        yield "disk", "a disk of random size", 12, lambda chance: full_disk(chance.randrange(8192, int(1.3 * whole)))
    largest = max(path.stat().st_size for path in straight().rglob("*"))
    yield "disk", "files of random size at most", 8, lambda chance: large_files(chance.randrange(1, largest))
    for calls in range(6):
        yield "killed early", f"as file {calls} takes its name", 1, lambda _, calls=calls: killed_at_file(calls)
    yield "damage", "a bit of the newest state", 8, flipped_state
    yield "damage", "every state cut short", 3, all_states_flipped
    for name in ("weights.safetensors", "parent.safetensors", "checkpoints/epoch-0001.safetensors"):
        yield "damage", f"a bit of {name}", 4, partial(flipped_weights, name=name)
    yield "damage", "a bit of kept scores", 6, flipped_scores
    yield "damage", "checkpoints/ deleted", 1, no_checkpoints
    yield "damage", "a state of another run", 1, foreign_state
    yield "damage", "a bad line in metrics.jsonl", 6, bad_line


def _write(rows: list[list[Any]]) -> None:
    """With the rows of other cases that are there."""
    with RESULT.open(encoding="utf-8", newline="") if RESULT.exists() else contextlib.nullcontext([]) as file:
        done = [row[:2] for row in rows]
        others = [row for row in list(csv.reader(file))[1:] if row[:2] not in done]
    table = sorted(rows + others, key=lambda row: row[0])
    write_table(RESULT, ["class", "case", "tried", "passed", "failures"], table)


def main() -> None:
    """Every case, a row each; exits with 1 unless all passed."""
    global SCRATCH
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", help="classes or cases, or parts of their names")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--times", type=int, default=20, help="at most so often")
    options = parser.parse_args()
    torch.set_num_threads(1)
    SCRATCH, rows = Path(tempfile.mkdtemp(prefix="recast-durable-")), []
    for kind, name, times, act in cases():
        if options.only and not any(word in f"{kind}: {name}" for word in options.only):
            continue
        started, failures = time.perf_counter(), []
        times = min(times, options.times)
        for number in range(times):
            failures += [found] if (found := act(random.Random(f"{options.seed} {name} {number}"))) else []
            for folder in SCRATCH.glob("[0-9]*"):
                shutil.rmtree(folder, ignore_errors=True)
        rows.append([kind, name, times, times - len(failures), " | ".join(sorted(set(failures)))])
        print(*rows[-1], f"{time.perf_counter() - started:.1f} s", sep="  ", flush=True)
        _write(rows)
    shutil.rmtree(SCRATCH)
    failed, tried = sum(row[2] - row[3] for row in rows), sum(row[2] for row in rows)
    print(f"{tried} cases, {failed} failed")
    raise SystemExit(failed > 0)


if __name__ == "__main__":
    main()
