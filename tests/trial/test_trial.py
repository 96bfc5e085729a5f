import errno
import json
import math
import os
import re
import shutil
from contextlib import nullcontext
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import timm
import torch
from in_browser import CHROMIUM, chromium, opened
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import nn

import recast
from recast.lab.cli import main
from recast.lab.cli.try_ import _check_unseen
from recast.lab.config import DataConfig, Recipe
from recast.lab.config.text import save_recipe
from recast.lab.data import Data, load_data
from recast.lab.data.seeding import choose_stratified
from recast.lab.folder.records import Wakefulness
from recast.lab.trial import arms, features, pace, run, runs, try_
from recast.lab.trial.answer import RATES, ArmLine, Facts, confidence, judge
from recast.lab.trial.features import Bank
from recast.lab.trial.page import write_page
from recast.lab.trial.split import last_layers, split_network
from recast.models.build import Images


@pytest.fixture(scope="module")
def data() -> Data:
    return load_data(DataConfig("digits", img_size=16, num_train=60, num_val=40))


def network(classes: int = 10, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    layers = [nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, classes)).eval()


@pytest.fixture(scope="module")
def plan() -> recast.Plan:
    return recast.plan(network(), torch.randn(1, 3, 16, 16), where="3")


def steady(tails: Any, train: Any, batch: int, device: Any, blocks: int = 1) -> list[list[dict[str, float]]]:
    """A clock that nothing disturbs."""
    return [[dict.fromkeys(tails, 1e-3)]] * blocks


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arms of two updates, and no page."""
    for module, name, value in ((arms, "HEAD_UPDATES", 5), (pace, "LEAST_UPDATES", 2), (pace, "MOST_EPOCHS", 1)):
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(pace, "ENOUGH_UPDATES", 2)
    monkeypatch.setattr(arms, "step_seconds", steady)
    monkeypatch.setattr(run, "find_spec", lambda name: None)


def comparable(answer: Any) -> Any:
    lines = [replace(line, seconds=0.0, step_ms=0.0) for line in answer.arms]
    return replace(answer, arms=tuple(lines), facts=replace(answer.facts, notes=()))


def test_an_interrupted_trial_goes_on_to_the_same_numbers(
    data: Data, plan: recast.Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, name, value in ((arms, "HEAD_UPDATES", 5), (pace, "LEAST_UPDATES", 4), (pace, "MOST_EPOCHS", 2)):
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(arms, "step_seconds", steady)

    def tried(folder: str, seed: int = 0) -> Any:
        return comparable(try_(network(7, seed), data, plan, tmp_path / folder, minutes=1e-3, seeds=2))

    spy = mock.Mock(wraps=arms.train_)
    monkeypatch.setattr(arms, "train_", spy)
    expected = tried("expected")
    assert [line.arm for line in expected.arms] == ["parent", *arms.COMPARED]
    assert expected.worth == "unclear"
    assert "Too short to say" in expected.sentence
    assert all(line.updates >= pace.LEAST_UPDATES for line in expected.arms[1:])
    assert {path.name for path in (tmp_path / "expected").iterdir()} >= {"answer.json", "trial.html", "heads.html"}
    monkeypatch.setattr(run, "find_spec", lambda name: None)  # no page
    (tmp_path / "part").mkdir()  # the clock chooses the numbers of updates: take the same
    (tmp_path / "part" / run.TRIAL).write_text((tmp_path / "expected" / run.TRIAL).read_text())
    child = recast.recast_(arms.with_head(network(7), 10), plan)
    child.load_state_dict(load_file(tmp_path / "expected" / runs.WEIGHTS), strict=False)
    rows = [json.loads(line) for line in (tmp_path / "expected" / runs.FILE).read_text().splitlines()]
    first = next(row for row in rows if (row["kind"], row["arm"], row["seed"]) == ("final", "recast", 0))
    count = expected.images
    images, labels = data.val.subset(choose_stratified(data.val.labels, count, "")).batch(range(count))
    with torch.no_grad():
        logits = child.eval()(data.normalised(images, torch.device("cpu")))
    assert (logits.argmax(1) == labels).tolist() == first["right"]
    calls = [(*map(len, call.args[1:]), call.kwargs["batch"], call.kwargs["seed"]) for call in spy.call_args_list]
    rates, finals = calls[2 : 2 + 2 * len(RATES)], calls[-2 * len(arms.COMPARED) :]
    assert len(set(rates)) == 1  # paired: the same images, views and order
    assert [len(set(part)) for part in (finals[:3], finals[3:])] == [1, 1]
    assert [seed for *_, seed in finals] == [0] * 3 + [1] * 3
    spy.side_effect = [*10 * [mock.DEFAULT], KeyboardInterrupt]
    with pytest.raises(KeyboardInterrupt):
        tried("part")
    spy.side_effect, spy.call_count = None, 0
    with (tmp_path / "part" / runs.FILE).open("a") as file:
        file.write('{"kind": "final", "arm": "fine')  # killed while it wrote
    assert tried("part") == expected
    trainings = 2 * len(RATES) + 2 * len(arms.COMPARED)
    assert spy.call_count == 2 + trainings - 8  # two classifiers again, and all but the 8 finished trainings
    assert tried("part") == expected
    with pytest.raises(recast.RecastError, match="other settings, network"):
        tried("part", seed=1)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("minutes", [1e-6, 1e3])
def test_other_classes_and_too_little_time_are_said_in_a_line(
    minutes: float, data: Data, plan: recast.Plan, tmp_path: Path
) -> None:
    lines: list[str] = []
    answer = try_(network(7), data, plan, tmp_path / "out", minutes=minutes, seeds=1, say=lines.append)
    assert any("has 7 classes, the data 10" in line for line in lines)
    assert any("has 7 classes, the data 10" in note for note in answer.facts.notes)
    assert any(f"minutes, not {minutes:g}: 2 updates an arm are the fewest" in line for line in lines) == (minutes < 1)


def test_the_names_of_classes_count(data: Data, plan: recast.Plan, tmp_path: Path) -> None:
    def opened(names: list[str]) -> tuple[run._Trial, list[str]]:
        lines: list[str] = []
        stated = Images(tuple(names)).note_(network())
        return run._Trial(stated, data, plan, tmp_path, 1.0, 1, torch.device("cpu"), lines.append), lines

    with pytest.warns(UserWarning, match="another order"):
        trial, lines = opened(data.classes[::-1])
    assert torch.equal(trial.network.get_parameter("7.weight"), network().get_parameter("7.weight").flip(0))
    assert (trial.is_new, lines) == (False, [])
    trial, lines = opened([f"no {name}" for name in data.classes])
    assert trial.is_new
    assert "the classes no 0, no 1" in lines[0]


@pytest.mark.parametrize("name", ["mean", "std", "buffer"])
def test_other_pixels_or_code_are_another_trial(name: str, data: Data, plan: recast.Plan, tmp_path: Path) -> None:
    def opened(network: nn.Module, data: Data) -> run._Trial:
        return run._Trial(network, data, plan, tmp_path, 1.0, 1, torch.device("cpu"), lambda line: None)

    before = opened(network(), data).settings
    assert before.keys() >= set(run.PIXELS)
    two = dict.fromkeys(arms.TRAINED, 2)
    amounts = pace.Pace(40, 20, 1, 10, two, two, 0.1, 8, "float16", [1.0], {"--minutes 2": 2})
    (tmp_path / run.TRIAL).write_text(json.dumps({"settings": before, "pace": asdict(amounts)}))
    opened(network(), data)
    changed = network()
    if name == "buffer":
        changed.register_buffer("shift", torch.ones(1), persistent=False)
    else:
        data = replace(data, **{name: (0.4, 0.4, 0.4)})
    with pytest.raises(recast.RecastError, match="network" if name == "buffer" else rf"{name} \(.*, now \[0.4"):
        opened(changed, data)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("classes", [7, 10])
def test_logits_are_read_from_a_tuple(classes: int, data: Data, tmp_path: Path) -> None:
    class Pair(nn.Sequential):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return super().forward(x), x

    pair = Pair(*network(classes)).eval()
    plan = recast.plan(pair, torch.randn(1, 3, 16, 16), where="3")
    answer = try_(pair, data, plan, tmp_path / "out", minutes=1e-3, seeds=1)
    assert [line.arm for line in answer.arms] == ["parent", *arms.COMPARED]


def _edit_rows(folder: Path, change: Any) -> None:
    rows = [json.loads(line) for line in (folder / runs.FILE).read_text().splitlines()]
    change(rows)
    (folder / runs.FILE).write_text("".join(json.dumps(row) + "\n" for row in rows))


def _edit_pace(folder: Path, change: Any) -> None:
    content = json.loads((folder / run.TRIAL).read_text())
    change(content["pace"])
    (folder / run.TRIAL).write_text(json.dumps(content))


def _edit_features(folder: Path) -> None:
    array = np.load(path := folder / run.FEATURES / "val-0.npy")
    np.save(path, array * np.nan)


DAMAGE: dict[str, tuple[Any, str]] = {  # the message, or the error after "!"
    "pace": (lambda path: _edit_pace(path, dict.clear), "!damaged.*--out"),
    "arms": (lambda path: _edit_pace(path, lambda pace: pace["step"].pop("added")), "!damaged.*--out"),
    "row": (lambda path: (path / runs.FILE).write_text('{"kind": "rate", "arm": "added", "seed": 0}\n'), "line 1"),
    "right": (lambda path: _edit_rows(path, lambda rows: rows[-1]["right"].pop()), "recast, seed 0 is damaged"),
    "curve": (lambda path: _edit_rows(path, lambda rows: rows[-2]["curve"].pop()), "equal time.*, seed 0 is damaged"),
    "weights": (lambda path: (path / runs.WEIGHTS).unlink(), "recast, seed 0 is damaged"),
    "cut": (lambda path: os.truncate(path / run.FEATURES / "val-0.npy", 300), "val-0.npy is damaged"),
    "nan": (_edit_features, "val-0.npy is damaged .*NaN"),
}


@pytest.mark.usefixtures("quick")
def test_a_damaged_folder_is_mended_or_an_error(data: Data, plan: recast.Plan, tmp_path: Path) -> None:
    def tried(folder: Path, say: Any = lambda line: None) -> Any:
        return comparable(try_(network(), data, plan, folder, minutes=1e-3, seeds=1, say=say))

    expected = tried(tmp_path / "whole")
    for name, (damage, match) in DAMAGE.items():
        shutil.copytree(tmp_path / "whole", folder := tmp_path / name)
        damage(folder)
        lines: list[str] = []
        if match.startswith("!"):
            with pytest.raises(recast.RecastError, match=match[1:]):
                tried(folder)
        else:
            assert tried(folder, lines.append) == expected
            assert any(re.search(match, line) for line in lines)
            lines.clear()
            assert tried(folder, lines.append) == expected
            assert [line for line in lines if re.search("is damaged|damaged or", line)] == []  # mended for good


@pytest.mark.usefixtures("quick")
def test_nan_and_a_full_disk_are_errors(
    data: Data, plan: recast.Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = network()
    broken.get_parameter("7.weight").data.fill_(torch.nan)
    with pytest.raises(recast.RecastError, match="NaN or infinite logits"):
        try_(broken, data, plan, tmp_path / "new", minutes=1e-3, seeds=1)
    path, parts = tmp_path / "features.npy", iter([torch.zeros(32, 4), torch.full((8, 4), torch.inf)])
    with pytest.raises(recast.RecastError, match="NaN or infinity for image 32"):
        features._write(parts, data.val, "float16", path, lambda count: None)

    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(features, "_write", full)
    with pytest.raises(recast.RecastError, match=r"val-0\.npy: No space left.* the same command"):
        try_(network(), data, plan, tmp_path / "new", minutes=1e-3, seeds=1)


def bank(images: int = 10, views: int = 3) -> Bank:
    arrays = tuple(np.full((images, 1), 100.0 * view, np.float16) + np.arange(images)[:, None] for view in range(views))
    return Bank(arrays, torch.arange(images), torch.arange(images))


def test_batches_follow_from_the_seed_and_every_view_comes() -> None:
    cpu = torch.device("cpu")
    few, many = ([x for x, _ in bank().training(5, updates, 3, cpu)] for updates in (4, 6))
    assert all(map(torch.equal, few, many))
    assert not torch.equal(few[0], next(bank().training(5, 1, 4, cpu))[0])
    assert torch.cat(many).flatten().sort().values.tolist() == [100.0 * v + i for v in range(3) for i in range(10)]
    assert bank().subset(torch.tensor([7, 2])).spread(1).images.tolist() == [7]


def test_the_other_path_starts_at_zero_and_costs_what_attention_adds(plan: recast.Plan) -> None:
    conv, images = nn.Conv2d(8, 8, 3, padding=1), torch.randn(2, 8, 8, 8)
    step = plan.steps[0]
    beside = arms.Beside(conv, step)
    assert torch.equal(beside(images), conv(images))
    added = sum(p.numel() for p in (beside.narrow.weight, beside.wide.weight)) * 64  # a multiply-add at each of 8 × 8
    assert abs(added - (step.after.macs - step.before.macs)) <= 64 * (9 * 8 + 8) / 2


@pytest.mark.usefixtures("quick")
def test_attention_after_a_block_is_tried(data: Data, tmp_path: Path) -> None:
    *stage, pool, flat, head = network()
    parent, images = nn.Sequential(nn.Sequential(*stage), pool, flat, head).eval(), torch.randn(2, 3, 16, 16)
    plan = recast.plan(parent, images, recast.RecastConfig(beside="block"), where="0.3")
    answer = try_(parent, data, plan, tmp_path / "out", minutes=1e-3, seeds=1)
    assert {line.arm for line in answer.arms} >= {"parent", "finetuned", "recast"}
    tail = split_network(parent, last_layers(parent, plan.steps), images).tail
    with_path = arms.make("added", tail, plan, bank(), 0, torch.device("cpu"))
    assert isinstance(with_path.network.get_submodule("0.attention"), arms.Beside)
    assert [name for name, _ in parent[0].named_children()] == ["0", "1", "2", "3", "4"]


def test_a_fitted_classifier_learns_what_features_hold() -> None:
    torch.manual_seed(0)
    labels = torch.arange(40) % 4
    images = torch.nn.functional.one_hot(labels, 4).float()[:, :, None, None].expand(-1, -1, 4, 4).clone()
    model = arms.with_head(nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32, 9)), 4).eval()
    parts = arms.split_network(model, ["0"], images)
    train, cpu = Bank((images.numpy(),), labels, torch.arange(40)), torch.device("cpu")
    (tail,) = arms.with_fitted_head(parts.tail, [train], cpu)
    assert all(arms.score(tail, train, cpu)[1])
    assert torch.equal(tail.network.get_parameter("0.weight"), model.get_parameter("0.weight"))


FACTS = Facts(100, 5.0, 20.0, 10.0, "layer4.0", 4, updates=100, seeds=3, ways={"--minutes 12": 12})


def table(rights: dict[str, float], images: int, seeds: int = 3) -> dict[str, list[list[bool]]]:
    """Arm → seed → images: the first share of them, and in every seed one more, right."""
    return {
        arm: [[place < share * images + seed for place in range(images)] for seed in range(seeds)]
        for arm, share in rights.items()
    }


@pytest.mark.parametrize(
    ("rights", "images", "worth", "gains"),
    [
        ({"recast": 0.8, "finetuned": 0.7, "longer": 0.75, "added": 0.7}, 400, "yes", (10.0, 5.0)),
        ({"recast": 0.704, "finetuned": 0.7, "longer": 0.7, "added": 0.7}, 400, "no", (0.5, 0.5)),
        ({"recast": 0.6, "finetuned": 0.7, "longer": 0.7, "added": 0.7}, 400, "no", (-10.0, -10.0)),
        ({"recast": 0.71, "finetuned": 0.7, "longer": 0.7, "added": 0.7}, 100, "unclear", (1.0, 1.0)),
    ],
)
def test_the_answer_says_what_the_table_holds(
    rights: dict[str, float], images: int, worth: str, gains: tuple[float, float]
) -> None:
    lines = [ArmLine(arm, arm, 100 * share) for arm, share in rights.items()]
    answer = judge(table(rights, images), lines, Wakefulness(36, 31, 0.5), FACTS)
    assert answer.worth == worth
    assert (answer.gains["finetuned"].mean, answer.gains["longer"].mean) == pytest.approx(gains, abs=0.13)
    assert (answer.awake, answer.heads, answer.images, answer.seeds) == (31, 36, images, 3)
    assert "31 of 36" in answer.sentence
    assert answer.sentence.startswith(f"Worth a full run: {worth}. ")
    assert json.loads(answer.to_json())["gains"]["longer"]["mean"] == answer.gains["longer"].mean
    assert ("--minutes 40" in str(answer)) == ("--beside block" in str(answer)) == (worth != "yes")
    after_blocks = judge(table(rights, images), lines, Wakefulness(36, 31, 0.5), replace(FACTS, beside="block"))
    assert "--beside" not in str(after_blocks)
    assert "learning rate" not in str(answer)
    at_edge = [replace(line, rate=RATES[-1] if line.arm == "recast" else RATES[0]) for line in lines]
    assert any("learning rate" in change for change in judge(table(rights, images), at_edge, None, FACTS).changes)
    asleep = judge(table(rights, images), lines, Wakefulness(36, 1, 0.99), FACTS)
    assert asleep.worth == "unclear"
    assert "Attention slept" in asleep.sentence
    for top1, is_ahead in ((99.0, True), (50.0, False)):
        with_parent = judge(table(rights, images), [ArmLine("parent", "as it is", top1), *lines], None, FACTS)
        assert ("(99.0)" in with_parent.sentence) == is_ahead
        assert with_parent.worth == ("unclear" if is_ahead else worth)


def answered(rights: dict[str, float], trained: int, **facts: Any) -> Any:
    lines = [ArmLine(arm, arm, 100 * share) for arm, share in rights.items()]
    return judge(table(rights, 400, trained), lines, Wakefulness(36, 31, 0.5), replace(FACTS, **facts))


@pytest.mark.parametrize(
    ("trained", "facts", "worth", "words"),
    [
        (2, {"seeds": 2, "ratios": (1.3, 1.25, 1.35)}, "yes", "2 seeds"),
        (2, {"seeds": 2, "ratios": (1.3, 1.25, 1.4)}, "unclear", "1.25 to 1.40 times"),
        (2, {"seeds": 2, "ratios": (1.3, 1.25, 1.4), "ratio": 1.3}, "yes", "2 seeds"),
        (2, {"seeds": 2, "ratios": (1.3, 1.25, 1.5), "ratio": 1.3}, "unclear", "1.25 to 1.50 times"),
        (1, {"seeds": 1}, "unclear", "over the images only"),
        (2, {"seeds": 3}, "yes", "2 of at most 3 seeds"),
        (
            3,
            {"updates": 99},
            "unclear",
            "99 updates and 5 epochs an arm; an answer takes 100 updates and 1 epoch: about",
        ),
        (3, {"updates": 99, "epochs": 104.4}, "unclear", "99 updates and 104 epochs an arm"),
        (3, {"epochs": 0.9}, "unclear", "about 12 minutes (--minutes 12)"),
    ],
)
def test_what_cannot_decide_is_unclear(trained: int, facts: dict[str, Any], worth: str, words: str) -> None:
    answer = answered({"recast": 0.9, "finetuned": 0.7, "longer": 0.7}, trained, **facts)
    assert answer.worth == worth
    assert words in answer.sentence.replace("\xa0", " ")


@pytest.mark.parametrize(
    ("parent", "finetuned", "longer", "recast", "worth"),
    [
        (0.21, 0.23, 0.27, 0.24, "unclear"),  # seen twice, after 105 updates: 18 epochs gained 14 points
        (0.23, 0.36, 0.38, 0.36, "no"),  # CIFAR-100
        (0.42, 0.435, 0.444, 0.433, "no"),  # too little is gained to hide anything
        (0.21, 0.23, 0.27, 0.30, "yes"),
    ],
)
def test_a_no_needs_a_training_that_slows_down(
    parent: float, finetuned: float, longer: float, recast: float, worth: str
) -> None:
    rights = {"recast": recast, "finetuned": finetuned, "longer": longer}
    lines = [ArmLine(arm, arm, 100 * share) for arm, share in {"parent": parent, **rights}.items()]
    answer = judge(table(rights, 2000), lines, None, FACTS)
    assert answer.worth == worth
    assert ("4.0 points more" in answer.sentence) == (worth == "unclear")


def test_an_unsteady_clock_leaves_a_no_that_holds_at_equal_updates() -> None:
    for updates, time, ratios, worth in (
        (0.7, 0.7, (1.2, 1.5), "no"),
        (0.6, 0.7, (1.2, 1.5), "unclear"),
        (0.7, 0.7, (0.9, 1.5), "unclear"),
    ):
        assert answered({"recast": 0.7, "finetuned": updates, "longer": time}, 3, ratios=ratios).worth == worth


def test_a_look_before_the_last_seed_is_surer() -> None:
    early, last, only = (
        answered({"recast": 0.8, "finetuned": 0.75, "longer": 0.75}, 2, seeds=seeds).gains["longer"]
        for seeds in (5, 3, 2)
    )
    assert early.low < last.low < only.low
    for most in range(2, 8):
        assert sum(1 - confidence(seeds, most) for seeds in range(2, most + 1)) == pytest.approx(0.05)


def test_the_minutes_of_an_answer_fill_its_updates() -> None:
    speed = pace.Speed(0.1, {"finetuned": 1.0, "added": 1.1, "recast": 1.2}, 32)
    ways = pace._ways(speed, (2000, 400), 3, 10, {160: 0.5, 128: 0.3, 96: 0.2})
    needed, two, smaller = ways.items()
    assert needed == (f"--minutes {needed[1]}", math.ceil(speed.minutes((2000, 400), 3)))
    seconds = 2400 * 0.1 + 3 * 100 * (1.0 + 1.1 + 2.4) + 0.75 * 100 * 3.3
    assert 60 * needed[1] == pytest.approx(pace.SPARE * seconds, rel=0.15)  # the rest is validation
    assert two[0] == f"--seeds 2 --minutes {two[1]}"
    assert two[1] < needed[1]
    assert smaller[0] == f"--img-size 96 --minutes {smaller[1]}"
    assert 0.2 * needed[1] <= smaller[1] <= 0.2 * needed[1] + 1
    assert "--img-size 160" in list(pace._ways(speed, (2000, 400), 3, 20, {160: 0.5, 128: 0.3}))[-1]
    assert next(iter(pace._ways(speed, (2000, 400), 1, 10, {}))).startswith("--seeds 2 --minutes")


@pytest.mark.parametrize(("train", "val"), [(100, 40), (400, 5000), (1000, 5000), (50_000, 10_000)])
@pytest.mark.parametrize("seconds", [0.002, 0.05, 0.4])
def test_every_way_that_is_offered_gives_an_answer(
    train: int, val: int, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts: Any = mock.Mock()
    images: Any = mock.Mock(train=range(train), val=range(val), img_size=64)
    bank = Bank((np.zeros((20, 4, 2, 2), dtype=np.float32),), torch.zeros(20), torch.arange(20))
    blocks = [[{"finetuned": 4 * seconds, "added": 5 * seconds, "recast": 5 * seconds}]]
    monkeypatch.setattr(pace, "_sample", lambda *_: (bank, seconds, True, {}))
    monkeypatch.setattr(arms, "step_seconds", lambda *_: blocks)
    monkeypatch.setattr(arms, "make", lambda *_: None)
    monkeypatch.setattr(pace, "LIMIT", 1e6)

    def measured(minutes: Any) -> pace.Pace:
        return pace.measure_pace(parts, images, parts, minutes, 3, torch.device("cpu"))

    minutes = next(iter(measured("auto").ways.values()))
    for asked in ("auto", minutes, 3 * minutes):
        amounts = measured(asked)
        assert min(amounts.updates.values()) >= 100
        assert amounts.epochs >= 1


@pytest.mark.usefixtures("quick")
def test_minutes_auto_takes_what_an_answer_needs(
    data: Data, plan: recast.Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(pace, "MOST_EPOCHS", 20)
    answer = try_(network(), data, plan, tmp_path / "out", minutes="auto", seeds=2, say=lines.append)
    assert "(--minutes 1)" in next(line for line in lines if line.startswith("an answer takes")).replace("\xa0", " ")
    assert answer.facts.minutes == 1
    with pytest.raises(recast.RecastError, match="two seeds or more"):
        try_(network(), data, plan, tmp_path / "new", minutes="auto", seeds=1)
    monkeypatch.setattr(pace, "LIMIT", 0.5)
    with pytest.raises(recast.RecastError, match=r"at most 0.5 minutes; an answer takes .*--minutes 1"):
        try_(network(), data, plan, tmp_path / "new", minutes="auto", seeds=2)
    assert not (tmp_path / "new").exists()


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(("wins", "trained"), [(True, [2, 2, 2, 2]), (False, [4, 4, 0, 4])])
def test_a_clear_answer_saves_seeds_and_only_a_yes_trains_added_convolutions(
    wins: bool, trained: list[int], data: Data, plan: recast.Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(tail: Any, train: Any, test: Any, *, updates: int, **settings: Any) -> arms.Trained:
        is_recast = any(isinstance(module, recast.AttentionBeside) for module in tail.modules())
        right = tuple(place % 3 != 0 or (is_recast and wins) for place in range(len(test)))
        points = tuple((point, 1.0) for point in range(min(arms.CURVE_POINTS, updates)))
        return arms.Trained(0.1, points, 1.0, right)

    monkeypatch.setattr(arms, "train_", train)
    monkeypatch.setattr(arms, "attention", lambda *_: Wakefulness(2, 2, 0.5))
    monkeypatch.setattr(run._Trial, "_is_at_chance", lambda *_: False)
    monkeypatch.setattr("recast.lab.trial.answer.ENOUGH_UPDATES", 1)
    answer = try_(network(), data, plan, tmp_path / "out", minutes=1.0, seeds=4)
    rows = [json.loads(line) for line in (tmp_path / "out" / runs.FILE).read_text().splitlines()]
    assert answer.worth == ("yes" if wins else "unclear")
    assert [sum(row["kind"] == "final" and row["arm"] == arm for row in rows) for arm in arms.TRAINED] == trained
    assert ("added" in answer.gains) == wins


def test_steps_are_measured_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    order, seconds = list[str](), iter(range(1, 100))

    def train(tail: str, train: Any, test: Any, **settings: Any) -> arms.Trained:
        order.append(tail)
        return arms.Trained(next(seconds), (), 0.0, ())

    monkeypatch.setattr(arms, "train_", train)
    bank: Any = mock.Mock()
    blocks = arms.step_seconds({"finetuned": "a", "recast": "b"}, bank, 4, torch.device("cpu"), 2)  # type: ignore[dict-item]
    assert "".join(order) == 7 * "ab"  # one turn warms up
    assert blocks == [
        [{"finetuned": n, "recast": n + 1} for n in (3, 5, 7)],
        [{"finetuned": n, "recast": n + 1} for n in (9, 11, 13)],
    ]
    slower: Any = [{"finetuned": load, "recast": 1.2 * load} for load in (1, 2, 3, 4)]  # a load that grows
    assert arms.ratio_of(slower) == pytest.approx(1.2)


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium to look with")
def test_the_page_of_a_trial_fits_a_phone(tmp_path: Path) -> None:
    rights = dict.fromkeys(("recast", "finetuned", "longer", "added"), 0.7)
    lines = [ArmLine(arm, f"{arm}, trained for as long", 70.0, 1000, 9.0, 123.4, RATES[0]) for arm in rights]
    answer = judge(table(rights, 100), lines, Wakefulness(36, 1, 0.99), FACTS)
    path = write_page(tmp_path, answer, {"recast": [(1, 2.0), (2, 1.0)]}, "A trial")
    options = sorted(re.findall(r"--[a-z][a-z-]*", " ".join(answer.changes)))
    with chromium() as browser, opened(browser, path, viewport={"width": 390, "height": 844}) as page:
        assert page.evaluate("document.documentElement.scrollWidth") == 390
        box = page.locator(".scroll")
        assert box.evaluate("box => box.scrollWidth <= box.clientWidth")
        assert all(box.get_by_text("123", exact=True).nth(arm).is_visible() for arm in range(len(rights)))
        codes = page.locator(".changes code")
        assert sorted(codes.all_inner_texts()) == options
        assert len(options) > 2
        lines = codes.evaluate_all("codes => codes.map(code => code.getClientRects().length)")
        assert set(lines) == {1}


DIGITS = "--model digits_resnet --data digits --checkpoint w.safetensors"


@pytest.mark.parametrize(
    ("words", "match"),
    [
        ("", "--model"),
        ("--model resnet18 --data-dir .", "--pretrained"),
        ("--model digits_resnet --data digits --checkpoint no.pt", "no.pt"),
        (f"{DIGITS} --num-val 10", "20 validation images or more, digits has 10: add images, or .* --val-fraction"),
        (f"{DIGITS} --where none", "layers"),
        (f"{DIGITS} --minutes 0", "minutes"),
        (f"{DIGITS} --img-size 32x16", "32x16"),
        ("--model digits_resnet --pretrained --data csv", "--labels-file"),
        (f"{DIGITS} --in-chans 4", "in_chans=4"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_nothing(
    words: str, match: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save_file(timm.create_model("digits_resnet").state_dict(), "w.safetensors")
    assert main(["try", *words.split()]) == 2
    lines = [line for line in capfd.readouterr().err.splitlines() if not line.startswith("note:")]
    assert len(lines) == 1
    assert re.search(match, lines[0])
    assert [path.name for path in tmp_path.iterdir()] == ["w.safetensors"]


def test_another_folder_is_left_alone(data: Data, plan: recast.Plan, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").touch()
    several, single = replace(data, train=[0] * 60), replace(data, classes=["a"])  # type: ignore[arg-type]
    for values, folder, message in (
        (data, tmp_path, "--out"),
        (several, tmp_path / "new", "one class each"),
        (single, tmp_path / "new", "two classes or more"),
    ):
        with pytest.raises(recast.RecastError, match=message):
            try_(network(), values, plan, folder)
    with pytest.raises(recast.RecastError, match=r"GiB.*[1-9]"):
        run.check_space(tmp_path, 2**60)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_images_that_the_checkpoints_run_trained_on_are_rejected(tmp_path: Path) -> None:
    for label, k in product(("a", "b"), range(20)):
        (tmp_path / "images" / label).mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (4, 4), (k, k, k)).save(tmp_path / "images" / label / f"{k}.png")
    (tmp_path / "link").symlink_to(tmp_path / "images")
    (tmp_path / "run" / "finetuned").mkdir(parents=True)
    config = DataConfig("folder", str(tmp_path / "images"), img_size=4)
    save_recipe(Recipe(data=config), tmp_path / "run" / "recipe.yaml")
    for folder, fraction, checkpoint, is_wrong in (
        ("images", 0.1, "run/w.safetensors", False),
        ("images", 0.2, "run/w.safetensors", True),
        ("link", 0.2, "run/finetuned/w.safetensors", True),
        ("images", 0.2, "w.safetensors", False),  # no run
    ):
        images = load_data(config.replace(data_dir=str(tmp_path / folder), val_fraction=fraction))
        with pytest.raises(recast.RecastError, match=r"4 of 8 .*--val-fraction 0\.1") if is_wrong else nullcontext():
            _check_unseen(images, tmp_path / checkpoint, print)
