"""`fit`: the training loop, for a recast model and for a plain one alike."""

from __future__ import annotations

import math
import time
import warnings
from collections import deque
from collections.abc import Callable
from pathlib import Path
from threading import Event
from typing import Any

import torch
from timm.utils import ModelEmaV3
from torch import Tensor, nn

from recast.errors import RecastError
from recast.files import row_digest, write_json
from recast.io import write_model
from recast.lab.config import Recipe
from recast.lab.data import Data, Loader
from recast.lab.data.loading import worker_errors
from recast.lab.data.seeding import seeded
from recast.lab.records import Epoch, Measured
from recast.lab.signals import stop_signals, uninterrupted
from recast.lab.tasks import task_of
from recast.lab.training import distributed
from recast.lab.training.checkpoint import Position, State, newest_state, restore_, save_state, states
from recast.lab.training.distributed import Interrupted, Stopped, is_first, on_first, process_count
from recast.lab.training.metrics import Journal, heads_of, read_metrics, validate
from recast.lab.training.objective import Objective
from recast.lab.training.optim import WarmupDecay, check_trainable, gate_rate, learning_rates, make_optimizer
from recast.lab.training.prepare import some_images
from recast.lab.training.regularization import prepare_, train_mode
from recast.lab.training.step import Update
from recast.lab.training.switches import Switches
from recast.layers.cmhsa import recast_layers
from recast.models.build import Images, constructor
from recast.models.weights import load_weights_, read_header, read_safetensors
from recast.surgery.apply import recast_, refresh_gates_
from recast.surgery.plan import Plan

PROBED = 16
"""Validation images on which attention is looked at after every epoch."""


def fit(
    model: nn.Module, data: Data, recipe: Recipe, out: str | Path, *, resume: bool = False, progress: bool = True,
    name: str | None = None, parent: nn.Module | None = None, plan: Plan | None = None,
    on_step: Callable[[int, int, float], object] = lambda epoch, step, loss: None,
    on_start: Callable[[], object] = lambda: None,
) -> list[dict[str, Any]]:  # fmt: skip
    """Train `model` on `data` for `recipe.epochs` into the folder `out`; returns the rows of its metrics.jsonl.

    Writes `metrics.jsonl` (a row per epoch, epoch 0 before any training), `resume/` after every epoch, every
    `recipe.save_steps` updates and on Ctrl-C or SIGTERM, `checkpoints/epoch-0000.safetensors` and so on for every
    `recipe.keep_every` epochs, and `weights.safetensors` at the end. The model is left with the weights that were
    saved, in eval mode. With `resume` the training in `out` goes on where it stopped; one that is finished is left
    alone. `name` is what the progress bar says; `parent` is the teacher of `task.teacher.kind=parent` (not changed).
    `plan` is what `recipe.schedule` recasts during the training: `model` is given as it is before (on resume too), its
    layers are swapped before the epochs of their dates, and `schedule.json` tells what came of it. `on_step(epoch,
    step, loss)` is called for every finished update, in every process, with the mean loss of its whole batch.
    `on_start()` is called in the first process before anything is written. Started by torchrun, the processes share
    every batch.

    Raises RecastError for a folder that already holds a training, a state of another recipe, or a loss that is not
    finite (epoch and step named, and the newest state, which is from before it); Interrupted after Ctrl-C or SIGTERM.
    """
    out = Path(out)
    check_trainable(recipe)
    log, weights = out / "metrics.jsonl", out / "weights.safetensors"

    def finished() -> list[dict[str, Any]]:
        if not resume and (log.exists() or states(out) or weights.exists() or (out / "checkpoints").exists()):
            raise RecastError(f"{out} already holds a training: choose another folder, or resume it")
        return read_metrics(log) if weights.exists() else []  # written last: the training is finished

    with (
        distributed.process_group(recipe.device) as device, distributed.held(out), stop_signals() as stop, seeded(0)
    ):  # fmt: skip
        if rows := on_first(finished):
            if plan is not None and (saved := read_header(weights)["plan"]) is not None:
                ended = Plan.from_json(saved, f"{weights}'s plan")  # its pool is in the model that was given
                recast_(model, ended, steps=[step.name for step in ended.steps])
            load_weights_(model, read_safetensors(weights), weights)
            refresh_gates_(model.eval())
            return rows
        loop = _Loop(model, data, recipe, out, device, stop, progress, name, parent, plan, on_step)
        return loop.run(resume, on_start)


class _Loop:
    """One training: what it needs, set up once; `run` is the loop."""

    def __init__(
        self, model: nn.Module, data: Data, recipe: Recipe, out: Path, device: torch.device, stop: Event,
        progress: bool, name: str | None, parent: nn.Module | None, plan: Plan | None,
        on_step: Callable[[int, int, float], object],
    ) -> None:  # fmt: skip
        self.data, self.recipe, self.out, self.device = data, recipe, out, device
        self.stop, self.on_step = stop, on_step
        distributed.check_shares(recipe)
        self.batches = len(self._loader(epoch=1, start=0))
        switches = Switches.of(recipe, plan)
        name = name or ("recast" if recast_layers(model) or switches else "parent")
        self.journal = Journal(recipe, out, name, self.batches, progress, device)
        prepare_(model.to(device), recipe)
        distributed.share_(model)  # before anything is copied from it
        self.model = model = distributed.synchronise_batch_norm(model, device) if recipe.sync_bn else model
        self.rates = WarmupDecay(recipe.optim, recipe.epochs, self.batches, recipe.data.batch_size)
        decay = recipe.regularization.ema_decay
        self.state = State(
            model, make_optimizer(model, recipe.optim, recipe.data.batch_size),
            torch.amp.GradScaler(device.type, enabled=recipe.amp == "fp16"),
            None if decay is None else ModelEmaV3(model, decay=decay), switches=switches,
        )  # fmt: skip
        self.objective = Objective(recipe, data, model, parent, self.batches, device)
        self.state.loss = self.objective.stateful
        self.compiled: nn.Module = torch.compile(model) if recipe.compile else model  # type: ignore[assignment]
        network = distributed.wrapped(self.compiled, device)
        self.update = Update(self.state, network, recipe, data, self.objective, device)
        self.probe: list[Tensor] | None = None
        self.unread: deque[tuple[int, Tensor]] = deque()
        """Steps that were launched: their number, and their loss and the wishes to stop, summed over the processes."""

    def run(self, resume: bool, on_start: Callable[[], object]) -> list[dict[str, Any]]:
        """Epoch 0 is measured, then every epoch is trained, measured and saved."""
        state, recipe, out = self.state, self.recipe, self.out
        if resume and on_first(lambda: bool(states(out))):
            images = len(self.data.train)
            newest = on_first(lambda: restore_(state, recipe, out, images, read_metrics(out / "metrics.jsonl")))
            if not is_first():
                restore_(state, recipe, out, images, path=newest)
            if state.position.step > self.batches:
                raise RecastError(f"{newest} is at step {state.position.step} of an epoch of {self.batches}: delete it")
            if state.switches is not None:
                self.update.network = distributed.wrapped(self.compiled, self.device, self.update.network)
        on_first(on_start)
        try:
            with self.journal.open(state.position), worker_errors():
                warmup, steps = self.rates.warmup, self.rates.steps
                if steps and 2 * warmup > steps:
                    how = f"{warmup} of {steps} updates"
                    self.journal.say(f"note: the warm-up takes {how}: set optim.warmup_epochs lower")
                if state.position.epoch == 0:
                    self._end_epoch()
                else:
                    self.journal.say(f"note: goes on at epoch {state.position.epoch}, step {state.position.step}")
                while state.position.epoch <= recipe.epochs:
                    self._train_epoch()
                    self._end_epoch()
        except Stopped:
            with stop_signals():  # another Ctrl-C while it is saved
                self._save()
            what = f"interrupted: state saved in {out / 'resume'}; fit(..., resume=True) goes on"
            raise Interrupted(what, saved=True) from None
        except KeyboardInterrupt:  # the second Ctrl-C: perhaps in the middle of a step
            raise Interrupted(f"interrupted at once, nothing saved: {newest_state(out)}") from None
        finally:
            self.objective.watching.close()
        if state.evaluated is not self.model:
            self.model.load_state_dict(state.evaluated.state_dict())
        self._write_weights(refresh_gates_(self.model.eval()), "weights.safetensors")
        if self._asked_to_stop():
            raise Interrupted("interrupted: state saved; this training is finished", saved=True)
        return on_first(lambda: read_metrics(self.journal.path))

    def _asked_to_stop(self) -> bool:
        """Whether some process was; the same answer in all of them."""
        return distributed.sum_over_processes_(torch.tensor(float(self.stop.is_set())), self.device).item() > 0

    def _train_epoch(self) -> None:
        recipe, position = self.recipe, self.state.position
        if position.step == 0:
            self._switch()
        train_mode(self.model, recipe)
        self.journal.start_epoch(position)
        source = self._loader(position.epoch, position.step)
        asked = time.perf_counter()
        for pixels, labels in source:
            came = time.perf_counter()
            number = (position.epoch - 1) * self.batches + position.step
            self.objective.at(number)
            loss = self.update(pixels, labels, self.rates.factor(number))
            position.step += 1
            told = torch.full_like(loss, float(self.stop.is_set()), dtype=torch.float32)
            sums = distributed.sum_over_processes_(torch.stack([loss.float(), told]), self.device)
            self.unread.append((position.step, sums))
            finished = self._finished(lag=0 if self.device.type == "cpu" else 1)
            position.waited += came - asked
            position.seconds += time.perf_counter() - asked
            for name in set(source.bad_images).difference(position.bad_images):
                warnings.warn(f"{name} cannot be read: another image took its place", stacklevel=2)
                position.bad_images.append(name)
            if self._look_at(finished):
                raise Stopped
            if recipe.save_steps and position.step % recipe.save_steps == 0 and position.step < self.batches:
                self._save()
            asked = time.perf_counter()
        self._look_at(self._finished())
        if self._asked_to_stop():
            raise Stopped
        if process_count() > 1:  # a shared validation is not broken off: what was trained is safe before it begins
            self._save()
        if position.step != self.batches:
            raise AssertionError(f"an epoch of {self.batches} batches ended after {position.step}")

    def _switch(self) -> None:
        """Recast what is due before this epoch, and measure what it did to the network."""
        state, switches, epoch = self.state, self.state.switches, self.state.position.epoch
        if switches is None:
            return
        if due := switches.due(epoch):
            before = Measured(*on_first(lambda: self._measured_after(epoch - 1)))
            switches.take_(epoch, before, state.model, state.optimizer, state.ema, self.recipe, self.data)
            # the averaging of gradients is bound to the parameters that there were
            self.update.network = distributed.wrapped(self.compiled, self.device, self.update.network)
            self.journal.say(f"note: epoch {epoch}: {', '.join(due)} → attention")
        last = switches.record.switches[-1] if switches.record.switches else None
        if last is not None and last.epoch == epoch and last.after is None:
            last.after = Measured(*self._measure([])[:2])
        self._write_schedule()

    def _measured_after(self, epoch: int) -> tuple[float, float]:
        rows = (row for row in read_metrics(self.journal.path) if row["epoch"] == epoch)
        metric = f"val_{self.objective.task.validation[0]}"
        return next(((row["val_loss"], row[metric]) for row in rows), (math.nan, math.nan))

    def _write_schedule(self) -> None:
        switches = self.state.switches
        if switches is not None and is_first():
            write_json(self.out / "schedule.json", switches.record.to_dict())

    def _measure(self, left_out: list[str]) -> tuple[float, ...]:
        """Validation loss and the task's metrics, of the weights that count."""
        refresh_gates_(self.state.evaluated.eval())
        distributed.share_(self.state.evaluated, weights=False)
        return validate(self.state.evaluated, self.data, self.recipe, self.device, left_out, self.stop)

    def _probe(self) -> list[Tensor]:
        """The few validation images on which attention is looked at after every epoch, always the same."""
        if self.probe is None and recast_layers(self.state.evaluated):
            self.probe = list(some_images(self.data.val, PROBED, self.recipe, self.data, self.device))
        return self.probe or []

    def _finished(self, lag: int = 0) -> list[tuple[int, float, bool]]:
        """Steps launched but for the last `lag`: number, mean loss, whether some process was asked to stop. With a lag
        of one step an accelerator never waits for us."""
        found = []
        while len(self.unread) > lag:
            step, sums = self.unread.popleft()
            loss, told = (sums / process_count()).tolist()
            found.append((step, loss, told > 0))
        return found

    def _look_at(self, finished: list[tuple[int, float, bool]]) -> bool:
        """Count finished steps; True if somebody wants to stop. Raises RecastError for a loss that is not finite."""
        position, stop = self.state.position, False
        for step, loss, told in finished:
            if not math.isfinite(loss):
                self._diverged(f"loss is {loss} at epoch {position.epoch}, step {step}")
            position.loss_sum += loss
            self.on_step(position.epoch, step, loss)
            self.journal.step(loss, learning_rates(self.state.optimizer)[0], position)
            stop = stop or told
        return stop

    def _end_epoch(self) -> None:
        """Measure, write the row, move on to the next epoch and save the state, in this order."""
        state, recipe, started = self.state, self.recipe, time.perf_counter()
        position, trained = state.position, state.position.epoch > 0
        left_out: list[str] = []
        loss, *values = self._measure(left_out)
        if not math.isfinite(loss):
            self._diverged(f"validation loss is {loss} after epoch {position.epoch}")
        lr, gate_lr = learning_rates(state.optimizer)
        train_loss = position.loss_sum / self.batches if trained else None
        row = Epoch(
            epoch=position.epoch,
            train_loss=train_loss,
            val_loss=loss,
            metrics=dict(zip(self.objective.task.validation, values, strict=True)),
            lr=lr if trained else None,
            gate_lr=gate_lr if trained else None,
            seconds=position.seconds + time.perf_counter() - started,
            images_per_second=self.batches * recipe.data.batch_size / position.seconds if trained else None,
            data_wait=position.wait if trained else None,
            bad_images=len(distributed.union_over_processes(position.bad_images)),
            bad_val_images=len(distributed.union_over_processes(left_out)),
            layers=heads_of(state.evaluated, self._probe()),
        )
        self.journal.write(row)
        state.rows[row.epoch] = row_digest(row.to_dict())
        if recipe.keep_every is not None and position.epoch % recipe.keep_every == 0:
            # before the state: a run that goes on from an earlier one writes the same file again
            self._write_weights(state.evaluated, f"checkpoints/epoch-{position.epoch:04d}.safetensors")
        if (switches := state.switches) is not None:
            rate = gate_rate(recipe.optim, recipe.data.batch_size) * self.rates.factor(position.epoch * self.batches)
            state.switches = on_first(
                lambda: switches.decided(
                    state.model, self.data, recipe, self.objective.labels, train_loss, position.epoch,
                    rate * self.batches,
                )
            )  # fmt: skip
        self._write_schedule()
        state.position = Position(epoch=position.epoch + 1)
        self._save()
        if state.position.epoch <= recipe.epochs and self._asked_to_stop():
            raise Stopped

    def _save(self) -> None:
        """Wait for the device, look at every loss, then write: what is on disk is known to be finite."""
        self._look_at(self._finished())
        with uninterrupted():
            on_first(lambda: save_state(self.state, self.recipe, self.out, len(self.data.train)))

    def _write_weights(self, model: nn.Module, name: str) -> None:
        if is_first():
            made_by = constructor(self.recipe.model, num_classes=len(self.data.classes))
            data = self.data
            images = Images(tuple(data.classes), (data.test_size, data.test_size), data.mean, data.std)
            whole = self.objective.task.keeps_network
            write_model(model, self.out / name, made_by if whole else None, images, tried=False)

    def _loader(self, epoch: int, start: int) -> Loader:
        recipe, config = self.recipe, self.recipe.data
        return Loader(
            **task_of(recipe).loading(recipe, self.data), batch_size=config.batch_size, shuffle_seed=recipe.seed,
            epoch=epoch, start=start, workers=config.workers, repeats=recipe.augment.repeats, drop_last=True,
            part=distributed.process_number(), parts=process_count(), pin_memory=self.device.type == "cuda",
            bad_image=config.bad_image,
        )  # fmt: skip

    def _diverged(self, what: str) -> None:
        raise (RecastError if is_first() else distributed.ToldByFirst)(
            f"the {what}: lower optim.lr or optim.gate_lr, or set optim.clip_grad; {newest_state(self.out)}"
        )
