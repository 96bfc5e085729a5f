"""Costs of plan + recast_ + verify of a ResNet-50, of an installation and of starting up.

    python benchmarks/footprint.py                    # writes results/footprint.csv
    python benchmarks/footprint.py light [WHEEL]      # writes results/light.csv
    python benchmarks/footprint.py start              # writes results/start.csv

footprint.csv: seconds and peak memory beside one forward pass of the parent, each job in its own process, by turns,
medians of 3. Peak memory is the process's largest resident size above that after its imports, the model's weights
included. Two threads, batch of 8 images of 224×224, random weights.

light.csv: MB on disk that `pip install recast-vision` brings (files of the packages in this environment that it needs,
without extras), MB of the wheel, and seconds, elapsed and of the processor, of whole processes: medians of 5. On a
shared machine, take the processor's.

start.csv: the same seconds, medians of 7 by turns, and the processor's over those of `import torch, timm`.
"""

from __future__ import annotations

import argparse
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import PackageNotFoundError, distribution
from multiprocessing import get_context
from pathlib import Path
from statistics import median

import timm
import torch
from timing import RESULTS, machine, write

from recast.lab.cli import COMMANDS
from recast.surgery.apply import recast_
from recast.surgery.planning import plan
from recast.surgery.verify import trace, verify

REPEATS = 3
BATCH = 8
LIBRARIES = "import torch, timm"


def measure(name: str) -> tuple[float, float]:
    """Return the seconds and the peak memory of one job in MiB."""
    torch.set_num_threads(2)
    imported = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    model = timm.create_model("resnet50").eval()
    images = torch.randn(BATCH, 3, 224, 224)
    started = time.perf_counter()
    if name == "forward":
        with torch.no_grad():
            model(images)
    else:
        planned = plan(model, images)
        before = trace(model, planned, images)
        exactness = verify(before, recast_(model, planned), images)
        assert exactness.bitwise, exactness
    seconds = time.perf_counter() - started
    return seconds, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - imported) / 1024


def footprint() -> None:
    """Write footprint.csv."""
    jobs = ("forward", "plan_recast_verify")
    with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as pool:
        costs = list(pool.map(measure, REPEATS * jobs))
    rows = []
    for i, name in enumerate(jobs):
        seconds, peak_mib = map(median, zip(*costs[i :: len(jobs)], strict=True))
        row = {"job": name, "batch": BATCH, "seconds": round(seconds, 3)}
        row |= {"peak_mib": round(peak_mib, 1), "repeats": REPEATS, "machine": machine()}
        rows.append(row)
    write(RESULTS / "footprint.csv", rows)
    print(*rows, sep="\n")


def package_sizes(name: str, sizes: dict[str, float]) -> dict[str, float]:
    """Add a package and its requirements without extras to `sizes`: package → MB of its files."""
    key = re.sub(r"[-_.]+", "-", name).lower()
    if key in sizes:
        return sizes
    try:
        package = distribution(name)
    except PackageNotFoundError:  # for another system
        return sizes
    sizes[key] = sum(file.size or 0 for file in package.files or ()) / 1e6
    for line in package.requires or ():
        if "extra ==" not in line:
            package_sizes(re.match(r"[\w.-]+", line)[0], sizes)  # type: ignore[index]
    return sizes


def seconds_of(arguments: Sequence[str]) -> tuple[float, float]:
    """Return the seconds of one Python process, elapsed and of the processor."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, capture_output=True)
    elapsed, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    return elapsed, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def medians(jobs: Mapping[str, Sequence[str]], rounds: int) -> dict[str, list[float]]:
    """Return the median seconds of each process, elapsed and of the processor, by turns."""
    turns = [{name: seconds_of(arguments) for name, arguments in jobs.items()} for _ in range(rounds)]
    return {name: [median(turn[name][i] for turn in turns) for i in (0, 1)] for name in jobs}


def start() -> None:
    """Write start.csv."""
    plan = f"import recast; {LIBRARIES}; recast.plan(timm.create_model('resnet50'), torch.zeros(1, 3, 224, 224))"
    jobs = {LIBRARIES: ["-c", LIBRARIES], "import recast": ["-c", "import recast"]}
    jobs |= {f"recast {name}--help": ["-m", "recast", *name.split(), "--help"] for name in ("", "train ")}
    jobs["recast.plan of resnet50"] = ["-c", plan]
    seconds = medians(jobs, 7)
    rows = []
    for name, (elapsed, processor) in seconds.items():
        row = {"what": name, "elapsed_s": round(elapsed, 3), "processor_s": round(processor, 3)}
        row |= {"over_torch_timm": round(processor / seconds[LIBRARIES][1], 4), "machine": machine()}
        rows.append(row)
    write(RESULTS / "start.csv", rows)
    print(*rows, sep="\n")


def light(wheel: str | None) -> None:
    """Write light.csv."""
    sizes = package_sizes("recast-vision", {})
    heavy = {name: mb for name, mb in sizes.items() if re.match("torch|nvidia|cuda|triton|timm", name)}
    light = {name: mb for name, mb in sizes.items() if name not in heavy and name != "recast-vision"}
    rows: list[tuple[str, float, str]] = [("torch, torchvision, timm and CUDA", sum(heavy.values()), "MB")]
    rows.append((f"all else ({len(light)} packages)", sum(light.values()), "MB"))
    rows += [(f"  {name}", light[name], "MB") for name in sorted(light, key=light.__getitem__, reverse=True)[:6]]
    if wheel is not None:
        rows.append(("wheel", Path(wheel).stat().st_size / 1e6, "MB"))
    with tempfile.TemporaryDirectory() as folder:
        save = "import sys, timm, recast, recast.models as m; name, path = sys.argv[1:]; n = timm.create_model(name); "
        save += "import torch; s = 32 if 'cifar' in name else 224; "
        save += "recast.save(recast.recast_(n, recast.plan(n, torch.zeros(1, 3, s, s))), path, name)"
        jobs = {"python": ["-c", "0"]}
        jobs |= {line: ["-c", line] for line in ("import recast", "import torch", LIBRARIES)}
        for name in ("cifar_resnet20", "resnet50"):
            path = str(Path(folder) / f"{name}.safetensors")
            subprocess.run([sys.executable, "-c", save, name, path], check=True)
            jobs[f"recast.load of {name}"] = ["-c", f"import recast; recast.load({path!r})"]
        program = str(Path(folder) / "resnet50.pt2")
        subprocess.run([sys.executable, "-m", "recast", "export", path, "--to", "torch", "--out", program], check=True)
        jobs["torch.export.load of resnet50"] = ["-c", f"import torch; torch.export.load({program!r})"]
        jobs["recast --help"] = ["-m", "recast", "--help"]
        jobs |= {f"recast {name} --help": ["-m", "recast", name, "--help"] for name in COMMANDS}
        for name, (elapsed, processor) in medians(jobs, 5).items():
            rows += [(name, elapsed, "s"), (name, processor, "s of the processor")]
    table = [{"what": what, "value": round(v, 3), "unit": unit, "machine": machine()} for what, v, unit in rows]
    write(RESULTS / "light.csv", table)
    print(*table, sep="\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", nargs="?", choices=("footprint", "light", "start"), default="footprint")
    parser.add_argument("wheel", nargs="?", help="of light: the wheel to weigh")
    options = parser.parse_args()
    if options.table == "light":
        light(options.wheel)
    else:
        {"footprint": footprint, "start": start}[options.table]()
