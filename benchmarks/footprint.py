"""What plan + recast_ + verify of a ResNet-50 costs, beside one forward pass of the parent: seconds and peak memory.

    python benchmarks/footprint.py            # writes results/footprint.csv
    python benchmarks/footprint.py light      # writes results/light.csv: what it takes before anything is computed
    python benchmarks/footprint.py start      # writes results/start.csv: starting up beside importing torch and timm

Each job runs in a process of its own. Peak memory is the process's largest resident size above what it had after its
imports, the model's own weights included. Two threads, batch of 8 images of 224×224, random weights.

light.csv: MB on disk of what `pip install recast-vision` brings (files of the packages in this environment that it
needs, extras left out), MB of a wheel given as a second argument, and seconds, elapsed and of the processor, of whole
processes: medians of 5. Of a shared machine, take the processor's.

start.csv: the same seconds, medians of 7 by turns, and the processor's over those of `import torch, timm`.
"""

from __future__ import annotations

import json
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from statistics import median

from timing import RESULTS, machine, write_table

REPEATS = 3
BATCH = 8


def job(name: str) -> None:
    """Run one job and print its seconds and peak memory as JSON."""
    import timm
    import torch

    import recast
    from recast.surgery.apply import recast_
    from recast.surgery.planning import plan
    from recast.surgery.verify import trace, verify

    assert recast.__version__
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
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - imported
    print(json.dumps({"seconds": round(seconds, 3), "peak_mib": round(peak / 1024, 1)}))


def main() -> None:
    """Both jobs by turns, the medians to the file."""
    found: dict[str, list[dict[str, float]]] = {"forward": [], "plan_recast_verify": []}
    for _ in range(REPEATS):
        for name, results in found.items():
            output = subprocess.run([sys.executable, __file__, name], check=True, capture_output=True, text=True).stdout
            results.append(json.loads(output.splitlines()[-1]))
    medians = {
        name: [sorted(r[key] for r in results)[REPEATS // 2] for key in ("seconds", "peak_mib")]
        for name, results in found.items()
    }
    rows = [[name, BATCH, *values, REPEATS, machine()] for name, values in medians.items()]
    write_table(RESULTS / "footprint.csv", ["job", "batch", "seconds", "peak_mib", "repeats", "machine"], rows)
    print(medians)


def needed(name: str, found: dict[str, float]) -> dict[str, float]:
    """Package → MB of its files, for a package and what it needs here; extras are left out."""
    key = re.sub(r"[-_.]+", "-", name).lower()
    if key in found:
        return found
    try:
        package = distribution(name)
    except PackageNotFoundError:  # for another system
        return found
    found[key] = sum(file.size or 0 for file in package.files or ()) / 1e6
    for line in package.requires or ():
        name, extra = re.match(r"[\w.-]+", line)[0], "extra ==" in line  # type: ignore[index]
        if not extra:
            needed(name, found)
    return found


def once(command: Sequence[str]) -> tuple[float, float]:
    """Seconds of one process, elapsed and of the processor."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    elapsed, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    return elapsed, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def seconds(command: Sequence[str]) -> tuple[float, float]:
    """Elapsed and of the processor, of one process: medians."""
    elapsed, used = zip(*(once(command) for _ in range(5)), strict=True)
    return median(elapsed), median(used)


def start() -> None:
    """Processes by turns, to start.csv."""
    libraries = "import torch, timm"
    plan = f"import recast; {libraries}; recast.plan(timm.create_model('resnet50'), torch.zeros(1, 3, 224, 224))"
    jobs = {libraries: ["-c", libraries], "import recast": ["-c", "import recast"]}
    jobs |= {f"recast {name}--help": ["-m", "recast", *name.split(), "--help"] for name in ("", "train ")}
    jobs["recast.plan of resnet50"] = ["-c", plan]
    rounds = [{what: once([sys.executable, *arguments]) for what, arguments in jobs.items()} for _ in range(7)]
    rows = [[what, *(round(median(r[what][i] for r in rounds), 3) for i in (0, 1))] for what in jobs]
    table = [[*row, round(row[2] / rows[0][2], 4), machine()] for row in rows]
    write_table(RESULTS / "start.csv", ["what", "elapsed_s", "processor_s", "over_torch_timm", "machine"], table)
    print(*table, sep="\n")


def light(wheel: str | None) -> None:
    """What is there before anything is computed, to light.csv."""
    from recast.lab.cli import COMMANDS

    sizes = needed("recast-vision", {})
    heavy = {name: mb for name, mb in sizes.items() if re.match("torch|nvidia|cuda|triton|timm", name)}
    rest = {name: mb for name, mb in sizes.items() if name not in heavy and name != "recast-vision"}
    rows: list[tuple[str, float, str]] = [("torch, torchvision, timm and CUDA", sum(heavy.values()), "MB")]
    rows.append((f"all else ({len(rest)} packages)", sum(rest.values()), "MB"))
    rows += [(f"  {name}", mb, "MB") for name, mb in sorted(rest.items(), key=lambda one: -one[1])[:6]]
    if wheel is not None:
        rows.append(("wheel", Path(wheel).stat().st_size / 1e6, "MB"))
    with tempfile.TemporaryDirectory() as folder:
        save = "import sys, timm, recast, recast.models as m; name, path = sys.argv[1:]; n = timm.create_model(name); "
        save += "import torch; s = 32 if 'cifar' in name else 224; "
        save += "recast.save(recast.recast_(n, recast.plan(n, torch.zeros(1, 3, s, s))), path, name)"
        jobs = {"python": ["-c", "0"], "import recast": ["-c", "import recast"], "import torch": ["-c", "import torch"]}
        jobs["import torch, timm"] = ["-c", "import torch, timm"]
        for name in ("cifar_resnet20", "resnet50"):
            path = str(Path(folder) / f"{name}.safetensors")
            subprocess.run([sys.executable, "-c", save, name, path], check=True)
            jobs[f"recast.load of {name}"] = ["-c", f"import recast; recast.load({path!r})"]
        program = str(Path(folder) / "resnet50.pt2")
        subprocess.run([sys.executable, "-m", "recast", "export", path, "--to", "torch", "--out", program], check=True)
        jobs["torch.export.load of resnet50"] = ["-c", f"import torch; torch.export.load({program!r})"]
        jobs["recast --help"] = ["-m", "recast", "--help"]
        jobs |= {f"recast {name} --help": ["-m", "recast", name, "--help"] for name in COMMANDS}
        for what, arguments in jobs.items():
            elapsed, used = seconds([sys.executable, *arguments])
            rows += [(what, elapsed, "s"), (what, used, "s of the processor")]
    for what, value, unit in rows:
        print(f"{what:<40}{value:>10.3f} {unit}")
    table = ([what, round(value, 3), unit, machine()] for what, value, unit in rows)
    write_table(RESULTS / "light.csv", ["what", "value", "unit", "machine"], table)


if __name__ == "__main__":
    if sys.argv[1:2] == ["start"]:
        start()
    elif sys.argv[1:2] == ["light"]:
        light(next(iter(sys.argv[2:]), None))
    else:
        job(sys.argv[1]) if len(sys.argv) > 1 else main()
