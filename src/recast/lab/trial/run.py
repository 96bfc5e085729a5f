"""`try_`: will attention help on these images? The tail of a network trained in several ways, in minutes."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from torch import Tensor, nn

from recast.analysis.records import Wakefulness
from recast.errors import RecastError
from recast.files import locked, write_text
from recast.lab.data import Data, Loader
from recast.lab.data.datasets import ImageFiles, ImageTensors, LabelledImages
from recast.lab.data.seeding import choose_balanced, hold_out
from recast.lab.device import choose_device
from recast.lab.report.formats import plural
from recast.lab.trial import arms
from recast.lab.trial.answer import Answer, ArmLine, Facts, judge
from recast.lab.trial.arms import ARMS, RATED, RATES, TRAINED, Arm, Trained
from recast.lab.trial.features import PART, Bank, narrowed
from recast.lab.trial.split import Tail, split
from recast.models.build import check_logits, input_defaults
from recast.surgery.plan import Plan
from recast.tracing.examples import run_example

ANSWER = "answer.json"
FEWEST = 20
"""Training and validation images."""
MOST_VIEWS, MOST_EPOCHS, LEAST_UPDATES = 4, 20, 20
FEATURE_SHARE, MOST_BYTES = 0.4, 4 * 2**30
"""Features take at most this share of the time, and so many bytes of memory."""
RATE_PART, HELD_OUT = 4, 0.2
"""A rate is tried for a quarter of the updates, and judged by this share of the training images."""
SMALL, BATCHES = 96, (32, 64)
"""Images of an update; the larger number for images with a side below 96."""
AT_CHANCE, SURE = 512, 3
"""Images on which a classifier of the right size must be better than chance by three standard deviations."""


@dataclass(frozen=True)
class Pace:
    """What fits into the time, by measured rates."""

    train: int
    val: int
    views: int
    batch: int
    updates: int
    longer: int
    """Updates of the parent in the time of the recast arm."""
    step: Mapping[str, float]
    """Seconds of an update of each arm."""
    image: float
    """Seconds of an image's features."""
    bytes: int
    """Size of an image's features."""

    @property
    def epochs(self) -> float:
        """How often an arm sees every training image."""
        return self.updates * self.batch / self.train

    def updates_of(self, arm: Arm) -> int:
        """Updates of an arm."""
        return self.longer if arm == "longer" else self.updates

    def step_of(self, arm: Arm) -> float:
        """Seconds of an update of an arm."""
        return self.step["finetuned" if arm == "longer" else arm]

    @property
    def images(self) -> int:
        """Images whose features are computed, in all views."""
        return self.train * self.views + self.val

    def seconds(self, seeds: int) -> float:
        """Estimate of the whole trial, without validation."""
        runs = seeds * sum(self.updates_of(arm) * self.step_of(arm) for arm in TRAINED)
        rates = len(RATES) * (self.updates // RATE_PART) * sum(map(self.step_of, RATED))
        return self.images * self.image + runs + rates


def try_(
    model: nn.Module,
    data: Data,
    plan: Plan,
    out: str | Path,
    *,
    minutes: float = 10.0,
    seeds: int = 3,
    device: str | torch.device = "auto",
    progress: bool = False,
    say: Callable[[str], object] = lambda line: None,
) -> Answer:
    """Try whether attention helps on some images, before a full training: train the tail of the network alone.

    What comes before the first planned layer is computed once. Every arm trains on these features in the same way: the
    tail as it is, trained on for as many updates, for as many seconds, with convolutions of like cost added, and
    recast. A network with other classes, or whose classifier is at chance, gets a linear one first, the same for all.

    Args:
        model: a trained network that gives logits; only read.
        data: training and validation images, from `recast.lab.data.load_data`; normalised as the network states.
        plan: what is recast, from `recast.plan(model, images)`.
        out: new or empty folder, for answer.json.
        minutes: duration, by measured rates. More minutes give more updates, at most 20 epochs.
        seeds: of the order of the images and the start of new parameters.
        device: auto, cpu, cuda, …
        progress: show a bar with the time left on standard error.
        say: called with a line on what was chosen.

    Returns:
        An `Answer`: worth a full run or not, the gains with 95 % intervals, the arms.

    Raises:
        RecastError: before anything is written, for data of another task or too few images, a plan without layers, and
            a folder in use.

    Example:
        >>> answer = try_(parent, data, recast.plan(parent, images), "runs/try")  # doctest: +SKIP
        >>> answer.worth, answer.gains["longer"].low  # doctest: +SKIP
        ('yes', 61.2)
    """
    if not isinstance(data.train, ImageFiles | ImageTensors):
        raise RecastError(f"a trial takes image files with one class each, not {data.name}: use recast train")
    if not plan.steps or plan.pool is not None:
        raise RecastError("a trial is of recast layers: the plan must have some, and no attention pooling")
    if not (minutes > 0 and seeds >= 1):
        raise RecastError(f"minutes must be above 0 and seeds 1 or more, got {minutes} and {seeds}")
    for part, images in (("training", data.train), ("validation", data.val)):
        if len(images) < FEWEST:
            raise RecastError(f"a trial takes {FEWEST} {part} images or more, {data.name} has {len(images)}")
    hold_out(data.train.labels, HELD_OUT)  # raises where no class can spare an image
    if (defaults := input_defaults(model)) is not None and len(defaults.mean) == 3:
        data = replace(data, mean=defaults.mean, std=defaults.std)
    out = Path(out)
    if out.is_dir() and any(out.iterdir()):
        raise RecastError(f"{out} is not empty: choose a new folder with --out")
    trial = _Trial(model, data, plan, minutes, seeds, choose_device(device), say)
    with locked(out):
        answer = trial.run(progress)
        write_text(out / ANSWER, answer.to_json() + "\n")
    return answer


class _Trial:
    def __init__(
        self, model: nn.Module, data: Data, plan: Plan, minutes: float, seeds: int, device: torch.device,
        say: Callable[[str], object],
    ) -> None:  # fmt: skip
        self.data, self.plan, self.device, self.say = data, plan, device, say
        self.minutes, self.seeds, self.notes = minutes, seeds, list[str]()
        self.network, classes = copy.deepcopy(model).eval().to(device), len(data.classes)
        images = data.normalised(next(iter(Loader(data.val, 4)))[0], device)
        with torch.no_grad():
            logits = run_example(self.network, images)
        self.is_new = isinstance(logits, Tensor) and logits.dim() == 2 and logits.shape[1] != classes
        if self.is_new:
            arms.with_head(self.network, classes)
        else:
            check_logits(logits, len(images), classes, data.name)
        self.parts = split(self.network, [step.name for step in plan.steps], images)

    def run(self, progress: bool) -> Answer:
        """Measure the pace and train the arms."""
        count = sum(p.numel() for p in self.parts.tail.parameters())
        share = count / sum(p.numel() for p in self.network.parameters())
        self.say(f"split at {self.parts.tail.entry}: {share:.0%} of the parameters are trained")
        self.pace = self._measure_pace()
        self._say_pace()
        columns = TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn()
        console = Console(stderr=True)
        with Progress(*columns, console=console, transient=True, disable=not progress) as bar:
            return self._answer(bar, bar.add_task("features", total=self.pace.seconds(self.seeds)))

    def _note(self, line: str) -> None:
        self.notes.append(line)
        self.say(line)

    def _say_pace(self) -> None:
        pace, data = self.pace, self.data
        if pace.train < len(data.train) or pace.val < len(data.val):
            self._note(
                f"of {len(data.train):,} training and {len(data.val):,} validation images {pace.train:,} and "
                f"{pace.val:,} fit into {self.minutes:g} minutes; a longer trial takes more"
            )
        self.say(
            f"{pace.train:,} training images in {plural(pace.views, 'view')}, {pace.val:,} validation images: "
            f"{pace.images * pace.bytes / 2**20:,.0f} MiB of features\n{pace.updates:,} updates of "
            f"{pace.batch} images an arm, {pace.epochs:.2g} epochs; about {pace.seconds(self.seeds) / 60:.1f} minutes"
        )

    def _measure_pace(self) -> Pace:
        """Measure the seconds of an image's features and of an update of every arm, and fill the time with them."""
        data, budget = self.data, 60 * self.minutes
        count = min(PART, len(data.train))
        pixels_of = []
        for view in range(2):  # the first one warms up
            begin = time.perf_counter()
            pixels, labels = next(iter(Loader(data.train, count, epoch=view)))
            pixels_of.append(pixels)
            features = narrowed(self.parts.features(data.normalised(pixels, self.device))).cpu()
            image = (time.perf_counter() - begin) / count
        size = features[0].nbytes
        most = min(FEATURE_SHARE * budget / image, MOST_BYTES / size)
        val = min(len(data.val), max(FEWEST, int(most / 2)))
        train = min(len(data.train), max(FEWEST, int(most) - val))
        batch = min(BATCHES[data.img_size < SMALL], train)
        few = Bank((features,), labels, torch.arange(batch) % count)
        tails = {arm: arms.make(arm, self.parts.tail, self.plan, few, 0, self.device) for arm in RATED}
        step = arms.step_seconds(tails, few, batch, self.device)
        third = {arm: seconds / 3 for arm, seconds in step.items()}  # of a step: without gradients
        look = val / batch * self.seeds * (2 * third["finetuned"] + third["added"] + third["recast"])
        look += HELD_OUT * train / batch * len(RATES) * sum(third.values())
        a_seed = step["finetuned"] + step["added"] + 2 * step["recast"]  # `longer` takes as long as recast
        an_update = self.seeds * a_seed + len(RATES) / RATE_PART * sum(step.values())
        views = max(1, min(1 if torch.equal(*pixels_of) else MOST_VIEWS, int((most - val) / train)))
        while True:
            fits = int((budget - (train * views + val) * image - look) / an_update)
            updates = max(LEAST_UPDATES, min(fits, MOST_EPOCHS * train // batch))
            if views <= max(1, updates * batch / train):
                break
            views -= 1  # the last one would not be used
        longer = max(1, round(updates * step["recast"] / step["finetuned"]))
        return Pace(train, val, views, batch, updates, longer, step, image, size)

    def _bank(self, images: LabelledImages, count: int, views: int, name: str, bar: Progress, task: TaskID) -> Bank:
        if count < len(images):
            images = images.subset(choose_balanced(images.labels, count, name))
        return Bank.of(
            self.parts, self.data, images, views, self.device, lambda done: bar.advance(task, done * self.pace.image)
        )

    def _answer(self, bar: Progress, task: TaskID) -> Answer:
        pace = self.pace
        val = self._bank(self.data.val, pace.val, 1, "val", bar, task)
        train = self._bank(self.data.train, pace.train, pace.views, "train", bar, task)
        part, held_out = (train.subset(places) for places in hold_out(train.labels, HELD_OUT))
        start = start_of_part = self.parts.tail.to(self.device)
        if self.is_new or self._is_at_chance(start, train):
            bar.update(task, description="classifier")
            start, start_of_part = arms.with_fitted_head(start, [train, part], self.device)

        def train_arm(arm: Arm, tail: Tail, rate: float, updates: int, seed: int, *banks: Bank) -> tuple[Tail, Trained]:
            bar.update(task, description=f"{ARMS[arm]}, rate {rate:.0e}, seed {seed}")
            tail = arms.make(arm, tail, self.plan, banks[0], seed, self.device)
            return tail, arms.train_(
                tail, *banks, rate=rate, updates=updates, batch=pace.batch, seed=seed, device=self.device,
                advance=lambda: bar.advance(task, pace.step_of(arm)),
            )  # fmt: skip

        rates: dict[Arm, float] = {}
        few = max(1, pace.updates // RATE_PART)
        for arm in RATED:
            losses = {rate: train_arm(arm, start_of_part, rate, few, 0, part, held_out)[1].loss for rate in RATES}
            rates[arm] = min(RATES, key=losses.__getitem__)
        rates["longer"] = rates["finetuned"]
        runs: dict[Arm, list[Trained]] = {arm: [] for arm in TRAINED}
        awake = []
        for seed in range(self.seeds):
            for arm in TRAINED:
                tail, trained = train_arm(arm, start, rates[arm], pace.updates_of(arm), seed, train, val)
                runs[arm].append(trained)
                if arm == "recast":
                    awake.append(arms.attention(tail, val, self.device))
        _, parent = arms.measure(start, val, self.device)
        return self._judge(parent, runs, rates, [each for each in awake if each is not None])

    def _is_at_chance(self, tail: Tail, train: Bank) -> bool:
        few = train.spread(AT_CHANCE)
        _, right = arms.measure(tail, few, self.device)
        chance = 1 / len(self.data.classes)
        is_at_chance = mean(right) < chance + SURE * math.sqrt(chance * (1 - chance) / len(few))
        if is_at_chance:
            self._note(
                f"the classifier is right on {mean(right):.1%} of the training images, which is chance: another one is "
                "trained first"
            )
        return is_at_chance

    def _judge(
        self, parent: tuple[bool, ...], runs: dict[Arm, list[Trained]], rates: dict[Arm, float],
        awake: list[Wakefulness],
    ) -> Answer:  # fmt: skip
        pace = self.pace
        lines = [ArmLine("parent", ARMS["parent"], 100 * mean(parent))]
        for arm in TRAINED:
            top1 = 100 * mean(mean(each.right) for each in runs[arm])
            lines.append(ArmLine(arm, ARMS[arm], top1, pace.updates_of(arm), 1000 * pace.step_of(arm), rates[arm]))
        attention = sorted(awake, key=lambda each: each.awake)[len(awake) // 2] if awake else None
        most = MOST_EPOCHS * pace.train // pace.batch * pace.batch / pace.train
        facts = Facts(pace.train, pace.epochs, most, self.minutes, pace.views, tuple(self.notes))
        return judge({arm: [each.right for each in rows] for arm, rows in runs.items()}, lines, attention, facts)
