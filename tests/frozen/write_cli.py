"""What the command line says, frozen: `python tests/frozen/write_cli.py [help|errors|api|run|report|quickstart …]`.

Each name writes its frozen files anew, all of them but the quickstart (75 s) without a name. `test_cli_frozen.py`
holds the code to them.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
import re
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from html import unescape
from itertools import zip_longest
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import timm
import torch
from cli_mistakes import API, Case, cases

from recast.run.recipe import SEAL

FOLDER = Path(__file__).parent
HELP, ERRORS, API_ERRORS = FOLDER / "help", FOLDER / "errors.json", FOLDER / "api_errors.json"
RUN, QUICKSTART = FOLDER / "report_run", FOLDER / "quickstart"
SLOW = 0.2
"""Seconds from which on a mistake is looked for with RECAST_SLOW=1 only."""
SHOWN = 12
"""Lines of a table of a figure that are kept as they are."""
HELPS = {
    "recast": "--help",
    **{name: f"{name} --help" for name in ("quickstart", "plan", "verify", "evaluate", "explain", "fold", "check")},
    **{name: f"{name} --help" for name in ("export", "report", "zoo")},
    "train": "train --help",
    "train_tcnn": "train tcnn --help",
    "train_attention_pool_quick": "train attention_pool_quick --help",
}
TINY = (
    "model: {name: digits_resnet, checkpoint: weights.safetensors}\n"
    "data: {img_size: 16, num_train: 40, num_val: 20, batch_size: 20}\n"
    "optim: {lr: 1e-4}\nepochs: 1\namp: off\ndevice: cpu\n"
)


def platform() -> dict[str, str]:
    """What decides the last digits of a float32 sum: MKL and oneDNN cut products by the processor's caches."""
    cpus = Path("/proc/cpuinfo")
    words = (
        re.findall(r"^(?:vendor_id|cpu family|model|cache size)\s*: (.*)$", cpus.read_text(), re.M)
        if cpus.exists()
        else []
    )
    return {
        "torch": torch.__version__,
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "processor": ", ".join(dict.fromkeys(words)),
    }


@contextmanager
def inside(folder: Path) -> Iterator[None]:
    """Work in a folder, with the width of help fixed, no colour and no folder of data."""
    before = Path.cwd()
    plain = {name: value for name, value in os.environ.items() if name not in ("RECAST_DATA", "FORCE_COLOR", "RANK")}
    with mock.patch.dict(os.environ, plain | {"COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb"}, clear=True):
        os.chdir(folder)
        try:
            yield
        finally:
            os.chdir(before)


def call(words: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of `recast WORDS`, in this process."""
    from recast.cli import main

    out, err = io.StringIO(), io.StringIO()
    torch.manual_seed(0)
    with redirect_stdout(out), redirect_stderr(err):
        try:
            code = main(shlex.split(words))
        except SystemExit as done:
            code = int(done.code or 0)
        except Exception as error:  # a mistake that is not caught: said as what it is
            code = 1
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
    return code, out.getvalue(), err.getvalue()


def prepare(folder: Path) -> None:
    """The scratch folder that `cli_mistakes.py` tells of."""
    from PIL import Image
    from safetensors.torch import save_file

    import recast.models.small  # noqa: F401  registers digits_resnet with timm

    torch.manual_seed(0)
    save_file(timm.create_model("digits_resnet", num_classes=10).state_dict(), folder / "weights.safetensors")
    (folder / "tiny.yaml").write_text(TINY, encoding="utf-8")
    (folder / "notes.txt").write_text("mine\n", encoding="utf-8")
    (folder / "empty").mkdir()
    (folder / "images").mkdir()
    Image.new("RGB", (16, 16), (40, 90, 90)).save(folder / "images" / "a.png")
    with inside(folder):
        assert call("train tiny.yaml --epochs 0 --out run")[0] == 0


def placed(text: str, folder: Path) -> str:
    """`text` without the path of the scratch folder."""
    for path in {str(folder), str(folder.resolve())}:
        text = text.replace(path, "{tmp}")
    return text


def shown_help(name: str) -> str:
    """The help of one command."""
    with tempfile.TemporaryDirectory() as folder, inside(Path(folder)):
        code, out, err = call(HELPS[name])
    assert (code, err) == (0, ""), err
    return out


def mistake(case: Case, folder: Path) -> dict[str, Any]:
    """What a mistaken command line gives: its files, exit code and the lines on standard error."""
    line, files = case
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    begin = time.perf_counter()
    with inside(folder):
        code, _, err = call(line)
    slow = {"slow": True} if time.perf_counter() - begin > SLOW else {}
    for name in (*files, "new.csv", "new"):
        path = folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    return {"argv": line, **({"files": files} if files else {}), "code": code, "stderr": placed(err, folder)} | slow


def api_mistake(snippet: str, folder: Path) -> str:
    """The exception that a snippet of Python ends in, "RecastError: message"."""
    import safetensors.torch
    from torch import nn

    import recast
    import recast.models.small
    from recast.data import Data
    from recast.data.datasets import ImageTensors

    def net(classes: int = 10) -> nn.Module:
        torch.manual_seed(0)
        model: nn.Module = timm.create_model("digits_resnet", num_classes=classes).eval()
        return model

    images = ImageTensors(torch.zeros(4, 3, 16, 16).byte(), torch.arange(4))
    data = Data("zeros", images, images, list("abcd"), (0.5,) * 3, (0.5,) * 3, 16)
    known: dict[str, Any] = {
        "recast": recast, "torch": torch, "nn": nn, "safetensors": safetensors, "net": net, "data": data,
        "x": torch.zeros(1, 3, 16, 16), "folder": folder,
    }  # fmt: skip
    try:
        exec(snippet, known)
    except Exception as error:
        return placed(f"{type(error).__name__}: {error}", folder)
    return "nothing"


@contextmanager
def prepared() -> Iterator[Path]:
    """A scratch folder that is prepared."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        prepare(folder)
        yield folder


def write_json(path: Path, found: object) -> None:
    """A frozen JSON file."""
    path.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def write_help() -> None:
    """Write `help/`."""
    for name in HELPS:
        (HELP / f"{name}.txt").write_text(shown_help(name), encoding="utf-8")


def write_errors() -> None:
    """Write `errors.json`; a command line that is no mistake is named and left out."""

    def key(case: dict[str, Any]) -> tuple[str, str]:
        return case["argv"], json.dumps(case.get("files"))

    with prepared() as folder:
        found = [mistake(case, folder) for case in cases()]
    # what was measured before holds: another program may have slowed this run down
    held = {key(one): one.get("slow", False) for one in json.loads(ERRORS.read_text(encoding="utf-8"))}
    kept = []
    for one in found:
        slow = one.pop("slow", False)
        if one["code"] == 2 and one["stderr"].count("\n") == 1:
            kept.append(one | ({"slow": True} if held.get(key(one), slow) else {}))
        else:
            print(f"left out: {one['argv']!r}: exit code {one['code']}, {one['stderr'][:200]!r}", file=sys.stderr)
    write_json(ERRORS, kept)


def write_api() -> None:
    """Write `api_errors.json`; a snippet that raises nothing of the project's is named and left out."""
    with tempfile.TemporaryDirectory() as name:
        found = {key: api_mistake(snippet, Path(name).resolve()) for key, snippet in API.items()}
    for key, text in found.items():
        if not text.startswith("RecastError: "):
            print(f"left out: {key}: {text[:200]!r}", file=sys.stderr)
    write_json(API_ERRORS, {key: text for key, text in found.items() if text.startswith("RecastError: ")})


TRAIN = (
    "--model digits_resnet --data digits --img-size 16 --num-train 200 --num-val 50 --batch-size 50 --device cpu "
    "--amp off"
)
SUITES = "clean,fgsm,basic,cost,agreement,heads,fourier,cka"
PARENT = f"train finetune {TRAIN} --where none --no-control --epochs 4 --lr 3e-3 --checkpoint null --out parent"
OPTIONS = "--lr 1e-3 --gate-lr 5e-2 --epochs 3 --query-key zero"
CHILD = f"train finetune {TRAIN} --checkpoint parent/weights.safetensors {OPTIONS}"
RUNS = {
    "before": [f"{CHILD} --out before", f"evaluate before --eps 1 --suite {SUITES}"],
    "during": [
        f"{CHILD} --schedule progressive --keep-every 1 --gate-l1 0.01 --out during",
        "evaluate during --eps 1 --suite clean,cost,heads",
    ],
}
REPORTS = {"before": "before", "during": "during", "both": "before during"}
"""What the stored runs and the reports of them are made by."""

MEASURED = {"images_per_second": 2000.0, "peak_memory": 1048576.0, "seconds": 1.0, "data_wait": 0.01}
ABOUT = {
    "torch": "2.0", "timm": "1.0", "python": "3.11", "recast": "0.1.0", "platform": "Linux", "machine": "Linux, 2 CPUs",
    "cpu_count": 2, "date": "2026-01-01T00:00:00+00:00", "seconds": 1.0,
}  # fmt: skip


def make_run(name: str, folder: Path) -> str:
    """Make a run (and the parent, if need be) in `folder`; gives what the commands print."""
    said = ""
    with inside(folder):
        for words in [] if (folder / "parent").is_dir() else [PARENT]:
            assert call(words)[0] == 0
        for words in RUNS[name]:
            code, out, err = call(words)
            assert code == 0, err
            said += out
    settle(folder / name, folder)
    return settled_text(placed(said, folder))


def settle(run: Path, folder: Path) -> None:
    """Leave only text files and small arrays, and nothing in them of this machine, day and speed."""
    for path in sorted(run.rglob("*"), reverse=True):
        if path.name == "resume" or path.name == "scores" or path.name == "checkpoints":
            shutil.rmtree(path)
        elif path.suffix in (".safetensors", ".html"):
            path.unlink()
    for path in run.rglob("*.json"):
        write_json(path, settled(json.loads(path.read_text(encoding="utf-8")), ABOUT))
    for path in run.rglob("metrics.jsonl"):
        lines = path.read_text(encoding="utf-8").splitlines()
        rows = [settled(json.loads(line), MEASURED) for line in lines]
        path.write_text(
            "".join(json.dumps({name: row[name] for name in row if name != "checksum"}) + "\n" for row in rows)
        )
    for name in ("rows.csv", "differences.csv"):
        if (run / name).is_file():
            settle_rows(run / name)
    for path in run.rglob("*.yaml"):
        text = path.read_text(encoding="utf-8").partition(SEAL)[0]
        path.write_text(text.replace(f"{folder.resolve()}/", "").replace(f"{folder}/", ""), encoding="utf-8")


def settled(found: Any, fixed: Mapping[str, Any]) -> Any:
    """Plain data with the values of some keys fixed, wherever they are."""
    if isinstance(found, dict):
        return {
            key: fixed[key] if key in fixed and found[key] is not None else settled(value, fixed)
            for key, value in found.items()
        }
    return [settled(value, fixed) for value in found] if isinstance(found, list) else found


def settle_rows(path: Path) -> None:
    """Fix what a clock or the system measured in a table of rows."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        if row["metric"] in MEASURED:
            row["value"] = str(MEASURED[row["metric"]])
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys(), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def settled_text(text: str) -> str:
    """What a command prints without what a clock or the system measured."""
    text = re.sub(r"(?m)^.*(images_per_second|peak_memory).*$", r"{\1}", text)
    text = re.sub(r"[\d.,]+ images/s", "{speed} images/s", text)
    text = re.sub(r"data \d+ ?%", "data {wait}", text)
    return re.sub(r"\b\d+(\.\d+)? s\b", "{seconds} s", text)


INLINE = r"b|i|em|strong|code|small|sub|sup|a|span|td|th|s"


def page_text(html: str) -> str:
    """The visible text of an HTML page, an element a line; rows of a table stay on one."""
    html = re.sub(r"<(style|script|svg)\b.*?</\1>", "\n", html, flags=re.DOTALL)
    for found, text in (
        (r"\s+", " "), (r"<br\b[^>]*>", " "), (r"</t[dh]>", " | "), (rf"</?({INLINE})\b[^>]*>", ""),
        (r"<figure\b[^>]*>", "\nfigure: "), (r"<[^>]*>", "\n"),
    ):  # fmt: skip
        html = re.sub(found, text, html)
    lines = (" ".join(line.split()) for line in unescape(html).splitlines())
    return "".join(f"{line}\n" for line in lines if line)


def figures_text(folder: Path) -> str:
    """The index, the tables and the numbers behind the figures of `recast report --figures`, one after the other.

    Of a long file the first lines are given, and a digest of the rest.
    """
    found = []
    for path in sorted(path for path in folder.rglob("*") if path.suffix in (".csv", ".md", ".tex")):
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        rest = lines[SHOWN:] if path.name != "index.csv" else []
        digest = hashlib.sha256("".join(rest).encode()).hexdigest()[:16]
        found.append(f"== {path.relative_to(folder)}\n" + "".join(lines[: len(lines) - len(rest)]))
        found.append(f"... {len(rest)} more lines, {digest}\n" if rest else "")
    return "".join(found)


def report_texts(name: str, runs: Path) -> dict[str, str]:
    """The page of stored runs as text, and its figures and tables, by the name of the frozen file."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch).resolve()
        for run in REPORTS[name].split():
            shutil.copytree(runs / run, folder / run)
        with inside(folder):
            figures = "" if name == "both" else " --figures figures"
            code, _, err = call(f"report {REPORTS[name]} --out page.html{figures}")
        assert code == 0, err
        page = page_text((folder / "page.html").read_text(encoding="utf-8"))
        found = {f"{name}.txt": placed(page, folder)}
        return found | ({f"{name}.figures.txt": figures_text(folder / "figures")} if figures else {})


def write_runs() -> None:
    """Write the runs of `report_run/` and what their making prints, then the reports of them."""
    shutil.rmtree(RUN, ignore_errors=True)
    RUN.mkdir()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch).resolve()
        for name in RUNS:
            (RUN / f"{name}.said.txt").write_text(make_run(name, folder), encoding="utf-8")
            shutil.copytree(folder / name, RUN / name)
    write_json(RUN / "platform.json", platform())
    write_reports()


def write_reports() -> None:
    """Write the texts of the reports of the runs in `report_run/`."""
    for name in REPORTS:
        for file, text in report_texts(name, RUN).items():
            (RUN / file).write_text(text, encoding="utf-8")


def quickstart_texts(folder: Path) -> dict[str, str]:
    """What the quickstart prints and what it leaves behind, by the name of the frozen file."""
    with inside(folder):
        code, out, err = call("quickstart --out run")
    assert code == 0, err
    run = folder / "run"
    settle(run, folder)
    with inside(folder):
        assert call("report run --figures figures")[0] == 0
    found = {"said.txt": settled_text(placed(out, folder)), "figures.txt": figures_text(folder / "figures")}
    for path in sorted(run.rglob("*")):
        if path.suffix in (".csv", ".jsonl"):
            found["__".join(path.relative_to(run).parts)] = path.read_text(encoding="utf-8")
    page = (run / "report.html").read_text(encoding="utf-8")
    return found | {"page.txt": placed(page_text(page), folder)}


def write_quickstart() -> None:
    """Write `quickstart/`."""
    QUICKSTART.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        for name, text in quickstart_texts(Path(scratch).resolve()).items():
            (QUICKSTART / name).write_text(text, encoding="utf-8")
    write_json(QUICKSTART / "platform.json", platform())


NUMBER = re.compile(r"[-+]?\d+\.\d+(?:e[-+]?\d+)?|[-+]?\d+(?:e[-+]?\d+)?")


def difference(found: str, frozen: str, tolerance: float = 0.0) -> str | None:
    """The first line in which two texts differ, numbers by more than `tolerance`; None where none does."""
    for number, lines in enumerate(zip_longest(found.splitlines(), frozen.splitlines(), fillvalue="(no line)"), 1):
        ours, theirs = ([float(word) for word in NUMBER.findall(line)] for line in lines)
        words = {" ".join(NUMBER.sub("#", line).split()) for line in lines}  # other numbers, another width
        near = tolerance > 0 and len(words) == 1 and ours == pytest.approx(theirs, rel=tolerance, abs=tolerance)
        if lines[0] != lines[1] and not near:
            return f"line {number}\n  frozen: {lines[1]}\n  now:    {lines[0]}"
    return None


PARTS: dict[str, Callable[[], None]] = {"help": write_help, "errors": write_errors, "api": write_api, "run": write_runs}
MORE: dict[str, Callable[[], None]] = {"report": write_reports, "quickstart": write_quickstart}

if __name__ == "__main__":
    torch.set_num_threads(1)
    for part in sys.argv[1:] or PARTS:
        (PARTS | MORE)[part]()
