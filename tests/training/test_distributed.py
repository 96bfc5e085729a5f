"""Two processes (gloo, CPU) against one: the same losses, the same weights, every image counted once."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import timm.layers
import torch
from safetensors.torch import load_file
from small import small_child, small_data
from torch import nn
from two_processes import EMBEDDINGS, ODD, fit_embedding, recipe, run, run_scheduled

from recast.errors import RecastError
from recast.lab.config import ClassifyConfig, ScheduleConfig
from recast.lab.folder.run import RunFolder
from recast.lab.training import distributed
from recast.lab.training.distributed import Interrupted, check_shares
from recast.lab.training.loop import fit
from recast.lab.training.metrics import read_metrics

SCRIPT = Path(__file__).with_name("two_processes.py")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, two_processes: Any) -> Path:
    folder = tmp_path_factory.mktemp("distributed")
    _stop_alone(folder / "begun_by_one")
    done = two_processes(SCRIPT, folder)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


def _stop_alone(folder: Path) -> None:
    def press(epoch: int, step: int, _loss: float) -> None:
        if (epoch, step) == (2, 2):
            raise KeyboardInterrupt

    with pytest.raises(Interrupted):
        fit(small_child(), small_data(ODD), recipe(save_steps=1), folder, progress=False, on_step=press)


def assert_close(*runs: Path) -> None:
    mine, theirs = (load_file(run / "weights.safetensors") for run in runs)
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_losses_and_weights_are_those_of_one_process(folder: Path, tmp_path: Path) -> None:
    # dropout is drawn per part: one process that accumulates two parts draws what two processes draw
    losses, rows = run(tmp_path / "two", recipe(accumulate=2))
    undivided, _ = run(tmp_path / "undivided", recipe(), dropout=False)
    theirs = json.loads((folder / "losses.json").read_text(encoding="utf-8"))
    for name, mine in (("two", losses), ("undivided", undivided)):
        assert len(mine) == 20
        assert theirs[name] == pytest.approx(mine, rel=1e-5)
        assert_close(tmp_path / name, folder / name)
    for row, twin in zip(rows, read_metrics(folder / "two" / "metrics.jsonl"), strict=True):
        assert row["val_loss"] == pytest.approx(twin["val_loss"], rel=1e-5)
        assert (row["train_loss"] or 0) == pytest.approx(twin["train_loss"] or 0, rel=1e-5)
        assert row["val_top1"] == twin["val_top1"]


@pytest.mark.slow
def test_layers_switch_in_all_processes(folder: Path, tmp_path: Path) -> None:
    run_scheduled(tmp_path / "one", recipe(accumulate=2, schedule=ScheduleConfig("progressive")))
    assert "4.gamma" in load_file(folder / "scheduled" / "weights.safetensors")
    assert_close(tmp_path / "one", folder / "scheduled")
    mine, theirs = (json.loads((run / "schedule.json").read_text()) for run in (tmp_path / "one", folder / "scheduled"))
    assert mine["dates"] == theirs["dates"] == {"4": 2, "0": 3}
    for switch, twin in zip(mine["switches"], theirs["switches"], strict=True):
        assert switch["after"] == pytest.approx(twin["after"], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", EMBEDDINGS)
def test_processes_share_one_memory(name: str, folder: Path, tmp_path: Path) -> None:
    fit_embedding(tmp_path / "one", name, accumulate=2)
    assert_close(tmp_path / "one", folder / name)
    newest = (RunFolder(run).saved_states()[-1] for run in (tmp_path / "one", folder / name))
    mine, theirs = (torch.load(path, weights_only=True)["loss"]["memory"] for path in newest)
    assert torch.allclose(mine, theirs, atol=1e-5)
    assert mine.any(1).all()


@pytest.mark.slow
def test_every_image_counts_once_and_one_process_stops_all_at_the_same_step(folder: Path) -> None:
    losses = json.loads((folder / "losses.json").read_text(encoding="utf-8"))
    assert losses["counted"] == pytest.approx(100 * 7 / 19, rel=1e-12)  # labels 0, 1, 2, 0, ...: 7 of 19 are 0
    position = torch.load(RunFolder(folder / "stopped").saved_states()[-1], weights_only=True)["position"]
    assert (position["epoch"], position["step"]) == (2, 2)


@pytest.mark.slow
def test_a_run_goes_on_with_another_number_of_processes(folder: Path, tmp_path: Path) -> None:
    _stop_alone(tmp_path / "one")
    run(tmp_path / "one", recipe(accumulate=2), resume=True)
    assert_close(tmp_path / "one", folder / "begun_by_one")


@pytest.mark.slow
def test_a_dead_process_stops_the_other_in_bounded_time(tmp_path: Path, two_processes: Any) -> None:
    code = """
import os, sys
sys.path.insert(0, sys.argv[1])
import two_processes as script
def die(epoch, step, loss):
    if step == 3 and os.environ["RANK"] == "1":
        os._exit(9)
script.fit(script.small_child(), script.small_data(), script.recipe(), sys.argv[2], progress=False, on_step=die)
"""
    (tmp_path / "dies.py").write_text(code, encoding="utf-8")
    done = two_processes(tmp_path / "dies.py", SCRIPT.parent, tmp_path / "run")
    assert done.returncode != 0
    assert "exitcode" in done.stderr  # torchrun's summary names the process that died


def test_batches_that_cannot_be_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "process_count", lambda: 2)
    with pytest.raises(RecastError, match=r"data.batch_size 9, 2 processes and accumulate 1: .* use a multiple of 2"):
        check_shares(9, 1, ClassifyConfig())
    with pytest.raises(RecastError, match="parts of 3 images, but Mixup and CutMix pair them"):
        check_shares(6, 1, ClassifyConfig(mixup=0.5))


class NormRelu(nn.BatchNorm2d):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input).relu()


def test_a_norm_with_a_forward_of_its_own_is_not_synchronised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "process_count", lambda: 2)
    plain = nn.Sequential(nn.BatchNorm2d(2), nn.Sequential(timm.layers.BatchNormAct2d(2)))
    model = distributed.synchronise_batch_norm(plain, torch.device("cuda"))
    assert [type(module).__name__ for module in (model[0], model[1][0])] == ["SyncBatchNorm", "SyncBatchNormAct"]
    for module, device, message in (
        (NormRelu(2), "cuda", r"cannot replace 0 \(NormRelu\)"),
        (plain, "cpu", "requires GPUs"),
    ):
        with pytest.raises(RecastError, match=message):
            distributed.synchronise_batch_norm(nn.Sequential(module), torch.device(device))


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"WORLD_SIZE": "2"}, "without RANK, MASTER_ADDR, MASTER_PORT: start the command with torchrun, or unset"),
        ({"WORLD_SIZE": "2", "RANK": "0"}, "without MASTER_ADDR, MASTER_PORT"),
        ({"WORLD_SIZE": "two", "RANK": "0", "MASTER_ADDR": "h", "MASTER_PORT": "1"}, "WORLD_SIZE='two' is not a"),
        ({"WORLD_SIZE": "2", "RANK": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1"}, "RANK='2' is not a number that"),
        ({"WORLD_SIZE": "2", "RANK": "-1", "MASTER_ADDR": "h", "MASTER_PORT": "1"}, "RANK='-1'"),
        ({"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "h", "MASTER_PORT": "x"}, "MASTER_PORT='x'"),
        ({"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "h", "MASTER_PORT": "1", "LOCAL_RANK": "x"}, "LOCAL_RANK"),
        ({"WORLD_SIZE": ""}, None),
        ({"WORLD_SIZE": "1"}, None),
        ({"RANK": "3"}, None),
    ],
)
def test_variables_of_torchrun_that_do_not_fit(
    variables: dict[str, str], message: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    if message is None:
        with distributed.process_group("cpu") as device:
            assert device.type == "cpu"
        return
    with pytest.raises(RecastError, match=message), distributed.process_group("cpu"):
        pass


@pytest.mark.slow
def test_detection(tmp_path: Path, two_processes: Any) -> None:
    """AP of the untrained detector is that of one process: each measures a share of the images, and none twice."""
    words = "train detect --num-train 8 --num-val 5 --epochs 1 --batch-size 4 --lr 1e-3 --no-control --device cpu"
    alone, shared = tmp_path / "alone", tmp_path / "shared"
    one = subprocess.run([sys.executable, "-m", "recast", *words.split(), "--out", str(alone)], check=False)
    assert one.returncode == 0
    done = two_processes("-m", "recast", *words.split(), "--out", shared)
    assert done.returncode == 0, done.stderr[-3000:]
    mine, theirs = (read_metrics(folder / "metrics.jsonl") for folder in (alone, shared))
    assert mine[0]["val_ap"] == theirs[0]["val_ap"]
    assert mine[0]["val_loss"] == pytest.approx(theirs[0]["val_loss"], rel=0.05)  # of anchors drawn in each process
    assert mine[1]["train_loss"] == pytest.approx(theirs[1]["train_loss"], rel=0.2)
