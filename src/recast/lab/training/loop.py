"""`fit`: the training loop, for recast models and plain ones."""

from __future__ import annotations

import math
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event
from typing import Any

import torch
from timm.utils import ModelEmaV3
from torch import Tensor, nn

from recast.errors import RecastError
from recast.io import write_model
from recast.lab.config import Recipe
from recast.lab.data import Data, Loader
from recast.lab.data.datasets import LabelledImages
from recast.lab.data.loading import worker_errors
from recast.lab.data.seeding import seeded
from recast.lab.folder.files import write_json
from recast.lab.folder.records import Epoch, Measured, is_at_chance
from recast.lab.folder.run import RunFolder
from recast.lab.task import Setting, task_of
from recast.lab.training import distributed
from recast.lab.training.checkpoint import Position, State, newest_state, restore_, save_state
from recast.lab.training.distributed import Interrupted, Stopped, held, is_first, on_first, process_count
from recast.lab.training.metrics import Journal, heads_of, read_metrics, validate
from recast.lab.training.optim import WarmupDecay, check_trainable, learning_rates, make_optimizer
from recast.lab.training.regularization import prepare_, train_mode
from recast.lab.training.signals import stop_signals, uninterrupted
from recast.lab.training.step import AMP_DTYPES, Objective, Update
from recast.lab.training.switches import WAKING_IMAGES, Switches
from recast.layers.cmhsa import gated_layers, recast_layers
from recast.models.build import Images, constructor
from recast.models.config import ModelConfig
from recast.models.trust import is_function
from recast.models.weights import check_writable, load_weights_, read_header, read_safetensors
from recast.surgery.apply import recast_
from recast.surgery.chosen_forms import ChosenForms, choose_forms_, chosen_forms
from recast.surgery.plan import Plan
from recast.surgery.tuning import tune_

PROBED = 16
"""Number of validation images on which wakefulness is measured after every epoch."""


def fit(
    model: nn.Module, data: Data, recipe: Recipe, out: str | Path, *, resume: bool = False, progress: bool = True,
    name: str | None = None, parent: nn.Module | None = None, plan: Plan | None = None,
    on_step: Callable[[int, int, float], object] = lambda epoch, step, loss: None,
    on_start: Callable[[], object] = lambda: None,
) -> list[dict[str, Any]]:  # fmt: skip
    """Train `model` on `data` for `recipe.epochs` into the folder `out`; processes started by torchrun share a batch.

    Writes `metrics.jsonl` (a row per epoch, epoch 0 before any training), `resume/` after every epoch, every
    `recipe.save_steps` updates and on Ctrl-C or SIGTERM, and `weights.safetensors` at the end.

    Args:
        model: trained in place; left with the weights that were saved, in eval mode.
        data: training and validation images.
        recipe: settings of the training.
        out: folder of the training.
        resume: continue the training in `out`; a finished one is not changed.
        progress: show a line per epoch on standard error.
        name: name of the arm in these lines.
        parent: the teacher of `task.teacher.kind=parent`; only read.
        plan: layers that `recipe.schedule` recasts during the training, also on resume; `schedule.json` has the result.
        on_step: called with (epoch, step, mean loss of the whole batch) after every update, in every process.
        on_start: called in the first process before anything is written.

    Returns:
        The rows of metrics.jsonl.

    Raises:
        RecastError: for a folder that already holds a training, a state of another recipe, and a loss that is not
            finite; no state is saved after it.
        Interrupted: after Ctrl-C or SIGTERM.
    """
    folder = RunFolder(out)
    check_trainable(recipe.optim, recipe.amp, recipe.device)
    weights = folder.weights

    def finished() -> list[dict[str, Any]]:
        if not resume and (folder.metrics.exists() or folder.has_begun()):
            raise RecastError(f"{out} already holds a training: choose another folder, or resume it")
        return read_metrics(folder.metrics) if weights.exists() else []  # written last: the training is finished

    with distributed.process_group(recipe.device) as device, held(folder.path), stop_signals() as stop, seeded(0):
        if rows := on_first(finished):
            if plan is not None and (saved := read_header(weights)["plan"]) is not None:
                final = Plan.from_json(saved, f"{weights}'s plan")  # its pooling is in the model that was given
                recast_(model, final, steps=[step.name for step in final.steps])
            load_weights_(model, read_safetensors(weights), weights)
            model.eval()
            return rows
        loop = _Loop(model, data, recipe, folder, device, stop, progress, name, parent, plan, on_step)
        return loop.run(resume, on_start)


def write_weights(model: nn.Module, path: Path, config: ModelConfig, data: Data, is_buildable: bool = True) -> None:
    """Write a weight file with classes, normalisation and, if the network can be rebuilt by name, its constructor."""
    made_by = constructor(config, num_classes=len(data.classes)) if is_buildable else None
    images = Images(tuple(data.classes), (data.test_size, data.test_size), data.mean, data.std)
    write_model(model, path, made_by, images, tried=False)


class _Loop:
    """A training; `run` is the loop."""

    def __init__(
        self, model: nn.Module, data: Data, recipe: Recipe, folder: RunFolder, device: torch.device, stop: Event,
        progress: bool, name: str | None, parent: nn.Module | None, plan: Plan | None,
        on_step: Callable[[int, int, float], object],
    ) -> None:  # fmt: skip
        self.data, self.recipe, self.folder, self.device = data, recipe, folder, device
        self.stop, self.on_step = stop, on_step
        distributed.check_shares(recipe.data.batch_size, recipe.accumulate, recipe.task)
        check_writable(model)  # before anything is trained: the end, and a resume, load into it
        self.batches = len(self._loader(epoch=1, start=0))
        switches = Switches.of(recipe.schedule, recipe.epochs, plan)
        name = name or ("recast" if recast_layers(model) or switches else "parent")
        self.journal = Journal(recipe, folder.metrics, name, self.batches, progress)
        prepare_(model.to(device), recipe)
        distributed.share_(model)  # before anything is copied from it
        self.model = model = distributed.synchronise_batch_norm(model, device) if recipe.sync_bn else model
        self.rates = WarmupDecay(recipe.optim, recipe.epochs, self.batches, recipe.data.batch_size)
        decay = recipe.regularization.ema_decay
        self.state = State(
            model,
            make_optimizer(model, recipe.optim, recipe.data.batch_size),
            torch.amp.GradScaler(device.type, enabled=recipe.amp == "fp16"),
            None if decay is None else ModelEmaV3(model, decay=decay),
            switches=switches,
        )
        steps, amp = recipe.epochs * self.batches, AMP_DTYPES.get(recipe.amp)
        setting = Setting(steps, device, amp, recipe.regularization.freeze)
        self.objective = Objective(recipe.task, data, model, parent, setting)
        self.state.loss = self.objective.stateful
        self.compiled: nn.Module = model
        if recipe.compile != "off":
            self.compiled = torch.compile(model, mode=recipe.compile)  # type: ignore[assignment]
        network = distributed.wrapped(self.compiled, device)
        self.update = Update(self.state, network, recipe, data, self.objective, device)
        self.probe: list[Tensor] | None = None
        self.in_flight: deque[tuple[int, Tensor]] = deque()
        """Steps that the device may not have finished: number, then [loss, stop flag] summed over the processes."""

    def run(self, resume: bool, on_start: Callable[[], object]) -> list[dict[str, Any]]:
        """Measure epoch 0, then train, measure and save every epoch."""
        if resume and on_first(self.folder.saved_states):
            self._restore()
        on_first(on_start)
        try:
            with self.journal.open(self.state.position.epoch), worker_errors():
                self._train()
        except Stopped:
            with stop_signals():  # another Ctrl-C must not break off the saving
                self._save()
            message = f"interrupted: state saved in {self.folder.states}; continue with fit(..., resume=True)"
            raise Interrupted(message, saved=True) from None
        except KeyboardInterrupt:  # the second Ctrl-C, which may come in the middle of a step
            raise Interrupted(f"interrupted at once, nothing saved: {newest_state(self.folder)}") from None
        if self.state.evaluated is not self.model:
            self.model.load_state_dict(self.state.evaluated.state_dict())
        self.model.eval()
        if is_first():
            path = self.folder.weights
            write_weights(self.model, path, self.recipe.model, self.data, self.objective.task.keeps_network)
        if self._is_stop_requested():
            raise Interrupted("interrupted: state saved; this training is finished", saved=True)
        return on_first(read_metrics, self.journal.path)

    def _restore(self) -> None:
        """Load the newest state; every process loads the one that the first process chose."""
        images = len(self.data.train)
        path = on_first(restore_, self.state, self.recipe, self.folder, images)
        if not is_first():
            restore_(self.state, self.recipe, self.folder, images, path=path)
            self.state.position.bad_images = []  # the state lists those of the first process
        if self.state.switches is not None:
            self._wrap_again()

    def _wrap_again(self) -> None:
        """Average the gradients of the parameters that the network has now."""
        self.update.network = distributed.wrapped(self.compiled, self.device, self.update.network)

    def _train(self) -> None:
        """Run the remaining epochs, from the position of the state."""
        if self.state.position.epoch == 0:
            self._end_epoch()
        else:
            position = self.state.position
            self.journal.say(f"note: continues at epoch {position.epoch}, step {position.step}")
        while self.state.position.epoch <= self.recipe.epochs:
            self._train_epoch()
            self._end_epoch()

    def _is_stop_requested(self) -> bool:
        """Return True in all processes if a stop of any of them was requested."""
        return distributed.sum_over_processes_(torch.tensor(float(self.stop.is_set())), self.device).item() > 0

    def _train_epoch(self) -> None:
        """Train the batches of this epoch that are left. Raises Stopped if a stop was requested."""
        recipe, position = self.recipe, self.state.position
        if position.step == 0:
            self._switch()
            self._tune()
        train_mode(self.model, recipe.regularization.freeze, recipe.model.num_classes)
        self.journal.start_epoch(position)
        loader = self._loader(position.epoch, position.step)
        begin = time.perf_counter()
        for pixels, labels in loader:
            position.waited += time.perf_counter() - begin
            self._launch(pixels, labels)
            position.seconds += time.perf_counter() - begin
            for name in set(loader.bad_images).difference(position.bad_images):
                warnings.warn(f"{name} cannot be read: replaced by another image", stacklevel=2)
                position.bad_images.append(name)
            if self._finish(lag=0 if self.device.type == "cpu" else 1):
                raise Stopped
            if recipe.save_steps and position.step % recipe.save_steps == 0 and position.step < self.batches:
                self._save()
            begin = time.perf_counter()
        self._finish()
        if self._is_stop_requested():
            raise Stopped
        if process_count() > 1:  # a validation on several processes cannot be interrupted: save what was trained
            self._save()

    def _launch(self, pixels: Tensor, labels: Tensor) -> None:
        """Update the weights by a batch, without waiting for the device."""
        position = self.state.position
        number = (position.epoch - 1) * self.batches + position.step
        if self.state.loss is not None:
            self.state.loss.step = number
        loss = self.update(pixels, labels, self.rates.factor(number))
        position.step += 1
        stop = torch.full_like(loss, float(self.stop.is_set()), dtype=torch.float32)
        sums = distributed.sum_over_processes_(torch.stack([loss.float(), stop]), self.device)
        self.in_flight.append((position.step, sums))

    def _switch(self) -> None:
        """Recast the layers that are due before this epoch, and measure the network before and after."""
        state, switches, epoch = self.state, self.state.switches, self.state.position.epoch
        if switches is None:
            return
        if layers := switches.due(epoch):
            before = Measured(*on_first(self._measured_after, epoch - 1))
            averages = [] if state.ema is None else [state.ema.module]
            images = self._images(self.data.train.plain(), WAKING_IMAGES)
            recipe = self.recipe
            switches.take_(epoch, before, state.model, state.optimizer, averages, recipe.optim, recipe.seed, images)
            self._wrap_again()
            self.journal.say(f"note: epoch {epoch}: {', '.join(layers)} → attention")
        last = switches.record.switches[-1] if switches.record.switches else None
        if last is not None and last.epoch == epoch and last.after is None:
            last.after = Measured(*self._measure([])[:2])
        self._write_schedule()

    def _tune(self) -> None:
        """Choose the forms of new layers. The choices are part of the state, so that a resumed run keeps them."""
        state, recipe, layers = self.state, self.recipe, gated_layers(self.model)
        if not recipe.tune or (state.forms.layers if state.forms else {}).keys() >= layers.keys():
            return

        def measured() -> ChosenForms:
            count = max(1, recipe.data.batch_size // (process_count() * recipe.accumulate))
            images = next(self._images(self.data.train, count))
            with torch.autocast(self.device.type, AMP_DTYPES.get(recipe.amp), enabled=recipe.amp != "off"):
                self.journal.say(str(tune_(self.model, images)))
            return chosen_forms(self.model) or ChosenForms()

        state.forms = on_first(measured)
        choose_forms_(self.model, state.forms)
        self._save()  # timed again, other forms might win

    def _measured_after(self, epoch: int) -> tuple[float, float]:
        """Return validation loss and metric of an epoch from metrics.jsonl; NaN if its row is missing."""
        rows = (row for row in read_metrics(self.journal.path) if row["epoch"] == epoch)
        metric = f"val_{self.objective.task.validation[0]}"
        return next(((row["val_loss"], row[metric]) for row in rows), (math.nan, math.nan))

    def _write_schedule(self) -> None:
        switches = self.state.switches
        if switches is not None and is_first():
            write_json(self.folder.schedule, switches.record.to_dict())

    def _measure(self, skipped: list[str]) -> tuple[float, ...]:
        """Return validation loss and the task's metrics; names of unreadable images go to `skipped`."""
        self.state.evaluated.eval()
        distributed.share_(self.state.evaluated, weights=False)
        return validate(self.state.evaluated, self.data, self.recipe.data, self.device, skipped, self.stop)

    def _images(self, part: LabelledImages, count: int) -> Iterator[Tensor]:
        return self.data.some(part, count, self.recipe.data, self.recipe.seed, self.device)

    def _probe(self) -> list[Tensor]:
        """Return the first `PROBED` validation images, or nothing for a network without recast layers."""
        if self.probe is None and recast_layers(self.state.evaluated):
            self.probe = list(self._images(self.data.val, PROBED))
        return self.probe or []

    def _finish(self, lag: int = 0) -> bool:
        """Count the steps in flight except the last `lag`; True if a stop of some process was requested.

        With a lag of one step an accelerator never waits for us. Raises RecastError for a loss that is not finite.
        """
        position, is_stop_requested = self.state.position, False
        while len(self.in_flight) > lag:
            step, sums = self.in_flight.popleft()
            loss, stops = (sums / process_count()).tolist()
            if not math.isfinite(loss):
                self._diverged(f"loss is {loss} at epoch {position.epoch}, step {step}")
            position.loss_sum += loss
            self.on_step(position.epoch, step, loss)
            self.journal.step(loss, learning_rates(self.state.optimizer)[0], position)
            is_stop_requested = is_stop_requested or stops > 0
        return is_stop_requested

    def _end_epoch(self) -> None:
        """Measure the network, write the row, move on to the next epoch and save the state, in this order."""
        state, recipe, epoch = self.state, self.recipe, self.state.position.epoch
        row = self._row()
        self.journal.write(row)
        if epoch == 0:
            self._say_if_at_chance(row.metrics.get("top1"))
        self._write_schedule()
        state.position = Position(epoch=epoch + 1)
        self._save()
        if state.position.epoch <= recipe.epochs and self._is_stop_requested():
            raise Stopped

    def _say_if_at_chance(self, top1: float | None) -> None:
        """Say if a classifier that was kept guesses: while it learns other answers, it spoils the features."""
        model, classes = self.recipe.model, len(self.data.classes)
        if self.journal.name == "finetuned" or is_function(model.name):
            return  # the note stands above the recast arm; a function's classifier may be new
        if model.new_head or self.folder.has_new_parent(model) or (model.checkpoint is None and self.recipe.is_plain):
            return
        if top1 is not None and is_at_chance(top1 / 100, classes, len(self.data.val)):
            self.journal.say(
                f"note: before training {top1:.1f} % are right, and {100 / classes:.1f} % by guessing: if the classes "
                "mean something else now, begin with a new classifier (--new-head)"
            )

    def _row(self) -> Epoch:
        """Measure the network and return the row of this epoch. Raises RecastError for a loss that is not finite."""
        position, begin, skipped = self.state.position, time.perf_counter(), list[str]()
        loss, *values = self._measure(skipped)
        if not math.isfinite(loss):
            self._diverged(f"validation loss is {loss} after epoch {position.epoch}")
        trained: dict[str, Any] = {}
        if position.epoch > 0:
            lr, gate_lr = learning_rates(self.state.optimizer)
            speed = self.batches * self.recipe.data.batch_size / position.seconds
            trained = {"train_loss": position.loss_sum / self.batches, "lr": lr, "gate_lr": gate_lr}
            trained |= {"images_per_second": speed, "data_wait": position.wait}
        bad = torch.tensor([len(position.bad_images), len(skipped)])
        bad_images, bad_val_images = distributed.sum_over_processes_(bad, self.device).tolist()
        return Epoch(
            epoch=position.epoch,
            val_loss=loss,
            metrics=dict(zip(self.objective.task.validation, values, strict=True)),
            seconds=position.seconds + time.perf_counter() - begin,
            bad_images=bad_images,
            bad_val_images=bad_val_images,
            layers=heads_of(self.state.evaluated, self._probe()),
            **trained,
        )

    def _save(self) -> None:
        """Wait for the device, check every loss and write the state."""
        self._finish()
        with uninterrupted():
            on_first(save_state, self.state, self.recipe.plain(), self.folder, len(self.data.train))

    def _loader(self, epoch: int, start: int) -> Loader:
        recipe, config = self.recipe, self.recipe.data
        return Loader(
            **task_of(recipe.task).loading(recipe.task, self.data),
            batch_size=config.batch_size,
            shuffle_seed=recipe.seed,
            epoch=epoch,
            start=start,
            workers=config.workers,
            repeats=recipe.augment.repeats,
            drop_last=True,
            part=distributed.process_number(),
            parts=process_count(),
            pin_memory=self.device.type == "cuda",
            bad_image=config.bad_image,
        )

    def _diverged(self, reason: str) -> None:
        raise (RecastError if is_first() else distributed.ReportedByFirst)(
            f"the {reason}: lower optim.lr or optim.gate_lr, or set optim.clip_grad; {newest_state(self.folder)}"
        )
