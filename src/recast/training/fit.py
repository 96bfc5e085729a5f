"""`fit`: the training loop, for a recast model and for a plain one alike."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from recast.data import Data, loader
from recast.data.loading import Loader, worker_errors
from recast.data.seeding import seeded
from recast.errors import RecastError
from recast.io import read_header, save
from recast.models.build import constructor
from recast.models.weights import load_weights_, read_weights
from recast.run.config import Recipe
from recast.run.files import write_json
from recast.run.records import Epoch, Measured
from recast.surgery.apply import recast_, recast_layers, refresh_gates_
from recast.surgery.plan import Plan
from recast.training.checkpoint import Position, new_state, newest_state, restore_, save_state, states
from recast.training.distributed import (
    EchoError,
    anybody,
    is_first,
    on_first,
    process_count,
    process_group,
    process_number,
    share_buffers_,
    share_weights_,
    synchronise_batch_norm,
    union_over_processes,
    wrapped,
    wrapped_again,
)
from recast.training.freezing import rest_trunk
from recast.training.inputs import Inputs
from recast.training.learned import decide, probe_halves, to_be_decided
from recast.training.metrics import MetricsLog, gates_and_spans, measure
from recast.training.objective import Objectives
from recast.training.optim import WarmupCosine, check_trainable, gate_rate, learning_rates
from recast.training.pending import Outcome, Pending
from recast.training.progress import Display, timed, waited
from recast.training.ranges import check_shares
from recast.training.regularization import freeze_batch_norm, prepare_
from recast.training.signals import Interrupted, Stop, Stopped, stop_signals
from recast.training.switches import Switches
from recast.training.trackers import Tracker, check_trackers, open_trackers, track
from recast.training.update import Update


def fit(
    model: nn.Module,
    data: Data,
    recipe: Recipe,
    out: str | Path,
    *,
    resume: bool = False,
    progress: bool = True,
    name: str | None = None,
    parent: nn.Module | None = None,
    plan: Plan | None = None,
    on_step: Callable[[int, int, float], object] | None = None,
) -> list[dict[str, Any]]:
    """Train `model` on `data` for `recipe.epochs` into the folder `out`; returns the rows of its metrics.jsonl.

    Writes `metrics.jsonl` (a row per epoch, epoch 0 before any training), `resume/` after every epoch, every
    `recipe.save_steps` updates and on Ctrl-C or SIGTERM, `checkpoints/epoch-0000.safetensors` and so on for every
    `recipe.keep_every` epochs, and `weights.safetensors` at the end. The model is left with
    the weights that were saved, in eval mode. With `resume` the training in `out` goes on where it stopped; one that
    is finished is left alone. `name` is what the progress bar says; `parent` is the teacher of `distill.name=parent`
    (it is not changed). `plan` is what `recipe.schedule` recasts during the training: `model` is given as it is before
    (on resume too), its layers are swapped before the epochs of their dates, and `schedule.json` tells what came of it.
    `on_step(epoch, step, loss)` is called for every finished update, in every process, with the
    mean loss of its whole batch. Started by torchrun, the processes share every batch.

    Raises RecastError for a folder that already holds a training, a state of another recipe, or a loss that is not
    finite (epoch and step named, and the newest state, which is from before it); Interrupted after Ctrl-C or SIGTERM.
    """
    out = Path(out)
    check_trainable(recipe)
    with process_group(recipe.device) as device, stop_signals() as stop, seeded(0):
        if rows := on_first(lambda: _finished(out, resume)):
            if plan is not None and (made := read_header(out / "weights.safetensors")["plan"]) is not None:
                ended = Plan.from_json(made)  # its pool is in the model that was given
                recast_(model, ended, steps=[step.name for step in ended.steps])
            load_weights_(model, read_weights(out / "weights.safetensors"), out / "weights.safetensors")
            refresh_gates_(model.eval())
            return rows
        return _Fit(model, data, recipe, out, device, stop, progress, name, parent, plan, on_step).run(resume)


def _finished(out: Path, resume: bool) -> list[dict[str, Any]]:
    """The rows of a training that is finished, none of one that is not; raises where there should be nothing."""
    log, weights = MetricsLog(out / "metrics.jsonl"), out / "weights.safetensors"
    if not resume and (log.path.exists() or states(out) or weights.exists()):
        raise RecastError(f"{out} already holds a training: choose another folder, or resume it")
    return log.rows() if weights.exists() else []  # written last: the training is finished


class _Fit:
    """One training: what it needs, made once; `run` is the loop."""

    def __init__(
        self, model: nn.Module, data: Data, recipe: Recipe, out: Path, device: torch.device, stop: Stop,
        progress: bool, name: str | None, parent: nn.Module | None, plan: Plan | None,
        on_step: Callable[[int, int, float], object] | None,
    ) -> None:  # fmt: skip
        self.model, self.data, self.recipe, self.out, self.device, self.stop = model, data, recipe, out, device, stop
        self.on_step = on_step
        check_shares(recipe)
        check_trackers(recipe)
        switches = Switches.of(recipe, plan)
        prepare_(model.to(device), recipe)
        share_weights_(model)  # before anything is copied from it
        if recipe.sync_bn and process_count() > 1:
            model = self.model = synchronise_batch_norm(model, device)
        self.batches = len(self._loader(epoch=1, start=0))
        self.rates = WarmupCosine.of(recipe.optim, recipe.epochs, self.batches, recipe.data.batch_size)
        self.state = new_state(model, recipe, device, switches)
        self.inputs = Inputs(data, recipe, device)
        self.objectives = Objectives(recipe, data, model, parent, self.batches, device)
        self.compiled = _compiled(model) if recipe.compile else model
        self.update = Update(self.state, wrapped(self.compiled, device), recipe, self.inputs, self.objectives)
        self.pending, self.log = Pending(device), MetricsLog(out / "metrics.jsonl")
        name = name or ("recast" if recast_layers(model) or switches else "parent")
        self.display = Display(name, recipe.epochs, self.batches, recipe.data.batch_size, progress and is_first())
        self.trackers: list[Tracker] = []

    def run(self, resume: bool) -> list[dict[str, Any]]:
        """Epoch 0 is measured, then every epoch is trained, measured and saved."""
        state, recipe, out = self.state, self.recipe, self.out
        if resume and on_first(lambda: bool(states(out))):
            images = len(self.data.train)
            newest = on_first(lambda: restore_(state, recipe, out, images))
            if not is_first():
                restore_(state, recipe, out, images, newest)
            if state.switches is not None:
                self._wrap_again()
        if is_first():
            out.mkdir(parents=True, exist_ok=True)
            self.log.keep_before(state.position.epoch)
            self.trackers = open_trackers(recipe, out, state.position.epoch)
        try:
            with self.display:
                self._note_warmup()
                if state.position.step or state.position.epoch:
                    self.display.note(f"goes on at epoch {state.position.epoch}, step {state.position.step}")
                if state.position.epoch == 0:
                    self._end_epoch()
                with worker_errors():
                    while state.position.epoch <= recipe.epochs:
                        self._train_epoch()
                        self._end_epoch()
        except Stopped:
            with stop_signals():  # another Ctrl-C while it is saved
                self._save()
            raise Interrupted(f"interrupted: state saved in {out / 'resume'}; fit(..., resume=True) goes on") from None
        except KeyboardInterrupt:  # the second Ctrl-C: perhaps in the middle of a step
            raise Interrupted(f"interrupted at once, nothing saved: {newest_state(out)}") from None
        finally:
            self.objectives.close()
            for tracker in self.trackers:
                tracker.close()
        if state.ema is not None:
            self.model.load_state_dict(state.ema.module.state_dict())
        refresh_gates_(self.model.eval())
        if is_first():
            made_by = constructor(recipe.model, num_classes=len(self.data.classes))
            save(self.model, out / "weights.safetensors", constructor=made_by)
        if self._asked_to_stop():
            raise Interrupted("interrupted: state saved; this training is finished")
        return on_first(self.log.rows)

    def _note_warmup(self) -> None:
        warmup, steps = self.rates.warmup, self.rates.steps
        if steps and 2 * warmup > steps:
            self.display.note(f"the warm-up takes {warmup} of {steps} updates: set optim.warmup_epochs lower")

    def _asked_to_stop(self) -> bool:
        return anybody(self.stop.requested, self.device)

    def _train_epoch(self) -> None:
        state, recipe, position = self.state, self.recipe, self.state.position
        self._switch()
        self.model.train()
        if recipe.regularization.freeze == "trunk":
            rest_trunk(self.model, recipe.model.num_classes)
        elif recipe.regularization.freeze_bn:
            freeze_batch_norm(self.model)
        self.display.start_epoch(position.epoch, position.step)
        source = self._loader(position.epoch, position.step)
        for item in timed(source):
            pixels, labels = item.item
            factor = self.rates.factor((position.epoch - 1) * self.batches + position.step)
            self.objectives.at((position.epoch - 1) * self.batches + position.step)
            loss = self.update(pixels, labels, factor)
            position.step += 1
            self.pending.add(position.step, loss, self.stop.requested)
            outcomes = self.pending.finished()
            position.waited += item.waited
            position.seconds += time.perf_counter() - item.asked
            for name in set(source.bad_images).difference(position.bad_images):
                warnings.warn(f"{name} cannot be read: another image took its place", stacklevel=2)
                position.bad_images.append(name)
            if self._look_at(outcomes):
                raise Stopped
            if recipe.save_steps and position.step % recipe.save_steps == 0 and position.step < self.batches:
                self._save()
        self._look_at(self.pending.finished(everything=True))
        if self._asked_to_stop():
            raise Stopped
        if process_count() > 1:  # a shared validation is not broken off: what was trained is safe before it begins
            self._save()
        if state.position.step != self.batches:
            raise AssertionError(f"an epoch of {self.batches} batches ended after {position.step}")

    def _switch(self) -> None:
        """Recast what is due before this epoch, and measure what it did to the network."""
        state, position, switches = self.state, self.state.position, self.state.switches
        if switches is None or position.step > 0:
            return
        if due := switches.due(position.epoch):
            row = on_first(lambda: self.log.rows()[-1])
            before = Measured(row["val_loss"], row["val_top1"])
            switches.take_(position.epoch, before, state.model, state.optimizer, state.ema, self.recipe)
            self._wrap_again()
            self.display.note(f"epoch {position.epoch}: {', '.join(due)} → attention")
        last = switches.done[-1] if switches.done else None
        if last is not None and last.epoch == position.epoch and last.after is None:
            last.after = Measured(*self._measure([]))
        self._write_schedule()

    def _wrap_again(self) -> None:
        """Bind the averaging of gradients to the parameters there are now."""
        self.update.network = wrapped_again(self.update.network, self.compiled, self.device)

    def _write_schedule(self) -> None:
        switches = self.state.switches
        if switches is not None and is_first():
            write_json(self.out / "schedule.json", switches.to_dict())

    def _measure(self, left_out: list[str]) -> tuple[float, float]:
        """Validation loss and top-1 of the weights that count."""
        evaluated, config = self.state.evaluated, self.recipe.data
        refresh_gates_(evaluated.eval())
        share_buffers_(evaluated)
        return measure(
            evaluated, self.data, config.batch_size, self.device, config.workers, config.bad_image, self.stop, left_out
        )

    def _decide(self, train_loss: float | None) -> None:
        """Let a learned schedule look at the epoch that is over."""
        state, epoch, recipe = self.state, self.state.position.epoch, self.recipe
        switches = state.switches
        if switches is None or not to_be_decided(switches.schedule, epoch, recipe.epochs):
            return
        rate = gate_rate(recipe.optim, recipe.data.batch_size) * self.rates.factor(epoch * self.batches)
        state.switches = on_first(
            lambda: decide(
                switches, state.model, probe_halves(self.data, recipe, self.device), self.objectives.labels,
                train_loss, epoch, rate * self.batches,
            )
        )  # fmt: skip

    def _look_at(self, outcomes: list[Outcome]) -> bool:
        """Count finished steps; True if somebody wants to stop. Raises RecastError for a loss that is not finite."""
        position = self.state.position
        for outcome in outcomes:
            if not outcome.finite:
                self._diverged(f"loss is {outcome.loss} at epoch {position.epoch}, step {outcome.step}")
            position.loss_sum += outcome.loss
            if self.on_step is not None:
                self.on_step(position.epoch, outcome.step, outcome.loss)
            self.display.step(outcome.loss, learning_rates(self.state.optimizer)[0], position)
        return any(outcome.stop for outcome in outcomes)

    def _end_epoch(self) -> None:
        """Measure, write the row, move on to the next epoch and save the state, in this order."""
        state, recipe, started = self.state, self.recipe, time.perf_counter()
        position, evaluated = state.position, state.evaluated
        trained = position.epoch > 0
        left_out: list[str] = []
        loss, top1 = self._measure(left_out)
        if not torch.tensor(loss).isfinite():
            self._diverged(f"validation loss is {loss} after epoch {position.epoch}")
        lr, gate_lr = learning_rates(state.optimizer)
        seen = self.batches * recipe.data.batch_size
        row = asdict(
            Epoch(
                epoch=position.epoch,
                train_loss=position.loss_sum / self.batches if trained else None,
                val_loss=loss,
                val_top1=top1,
                lr=lr if trained else None,
                gate_lr=gate_lr if trained else None,
                seconds=position.seconds + time.perf_counter() - started,
                images_per_second=seen / position.seconds if trained else None,
                data_wait=waited(position) if trained else None,
                bad_images=len(union_over_processes(position.bad_images)),
                bad_val_images=len(union_over_processes(left_out)),
                layers=gates_and_spans(evaluated),
            )
        )
        if is_first():
            self.log.append(row)
            track(self.trackers, row)
        self._keep_weights()
        self._decide(position.loss_sum / self.batches if trained else None)
        self._write_schedule()
        state.position = Position(epoch=position.epoch + 1)
        self._save()
        self.display.row(row, recipe.data.workers)
        if state.position.epoch <= recipe.epochs and self._asked_to_stop():
            raise Stopped

    def _save(self) -> None:
        """Wait for the device, look at every loss, then write: what is on disk is known to be finite."""
        self._look_at(self.pending.finished(everything=True))
        on_first(lambda: save_state(self.state, self.recipe, self.out, len(self.data.train)))

    def _keep_weights(self) -> None:
        """Write the weights that were just measured to `checkpoints/`, where the recipe keeps this epoch's.

        Before the state: a run that goes on from an earlier one writes the same file again.
        """
        epoch, every = self.state.position.epoch, self.recipe.keep_every
        if every is None or epoch % every or not is_first():
            return
        made_by = constructor(self.recipe.model, num_classes=len(self.data.classes))
        save(self.state.evaluated, self.out / "checkpoints" / f"epoch-{epoch:04d}.safetensors", constructor=made_by)

    def _loader(self, epoch: int, start: int) -> Loader:
        recipe, config = self.recipe, self.recipe.data
        return loader(
            self.data.train, config.batch_size, shuffle_seed=recipe.seed, epoch=epoch, start=start,
            workers=config.workers, repeats=recipe.augment.repeats, drop_last=True, part=process_number(),
            parts=process_count(), pin_memory=self.device.type == "cuda", bad_image=config.bad_image,
        )  # fmt: skip

    def _diverged(self, what: str) -> None:
        raise (RecastError if is_first() else EchoError)(
            f"the {what}: lower optim.lr or optim.gate_lr, or set optim.clip_grad; {newest_state(self.out)}"
        )


def _compiled(model: nn.Module) -> nn.Module:
    compiled: nn.Module = torch.compile(model)  # type: ignore[assignment]
    return compiled
