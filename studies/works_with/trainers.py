"""Training loops of other packages: are the weights those of a plain loop after four steps of SGD?"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from tools import Case, Cell, tool
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import recast

LABELS = torch.arange(8) % 10
RATES = {"lr": 1e-3, "gate_lr": 1e-2, "weight_decay": 0.0}


def batches(case: Case) -> TensorDataset:
    """Return eight images with labels; four batches of two."""
    return TensorDataset(torch.cat([case.images, -case.images]), LABELS)


def optimizer_of(model: nn.Module, one_rate: bool = False) -> torch.optim.Optimizer:
    """Return SGD with Recast's groups, or with one group."""
    return torch.optim.SGD(model.parameters() if one_rate else recast.param_groups(model, **RATES), lr=RATES["lr"])


def compared(case: Case, trained: nn.Module, one_rate: bool = False) -> Cell:
    """Compare weights with those of a plain loop, and with those before."""
    model = copy.deepcopy(case.model).train()
    optimizer = optimizer_of(model, one_rate)
    for images, labels in DataLoader(batches(case), batch_size=2):
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
    state, before = trained.state_dict(), case.model.state_dict()
    for name in state:
        if name.endswith((".gamma", ".query")) and torch.equal(state[name], before[name]):
            return Cell("loses attention", None, f"{name} does not learn")
    error = max(
        float((state[name] - value).abs().max() / (value - before[name]).abs().max().clamp(min=1e-6))
        for name, value in model.state_dict().items()
        if value.is_floating_point()
    )
    return Cell("exact" if error < 1e-3 else "works" if error < 0.1 else "wrong", error)


def trainer(name: str, does: str, *packages: str, one_rate: bool = False) -> Callable[[Any], object]:
    """Add a function that trains a network on the eight images; it may return the trained one."""

    def add(train: Callable[[nn.Module, TensorDataset], nn.Module | None]) -> object:
        def run(case: Case) -> Cell:
            model = copy.deepcopy(case.model).train()
            return compared(case, train(model, batches(case)) or model, one_rate)

        return tool(name, does, *packages)(run)

    return add


def fit_by_lightning(model: nn.Module, data: TensorDataset, *callbacks: Any) -> Any:
    """Train by a module of Lightning; return its trainer."""
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: list[Tensor], index: int) -> Tensor:
            return F.cross_entropy(self.model(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer_of(self.model)

    trainer = lightning.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=list(callbacks),
    )
    trainer.fit(Module(), DataLoader(data, batch_size=2))
    return trainer


@trainer("Lightning", "`Trainer.fit` with `recast.param_groups`", "lightning==2.6.6")
def by_lightning(model: nn.Module, data: TensorDataset) -> None:
    fit_by_lightning(model, data)


@trainer("ignite", "`create_supervised_trainer`", "pytorch-ignite==0.5.5")
def by_ignite(model: nn.Module, data: TensorDataset) -> None:
    from ignite.engine import create_supervised_trainer

    create_supervised_trainer(model, optimizer_of(model), F.cross_entropy).run(DataLoader(data, batch_size=2))


@trainer("accelerate", "`prepare` and a loop of your own", "accelerate==1.15.0")
def by_accelerate(model: nn.Module, data: TensorDataset) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    prepared, optimizer, loader = accelerator.prepare(model, optimizer_of(model), DataLoader(data, batch_size=2))
    for images, labels in loader:
        optimizer.zero_grad()
        accelerator.backward(F.cross_entropy(prepared(images), labels))
        optimizer.step()


@trainer("transformers, Trainer", "`Trainer.train` on a wrapped network", "transformers==5.23.0", "accelerate==1.15.0")
def by_transformers(model: nn.Module, data: TensorDataset) -> None:
    from transformers import Trainer, TrainingArguments

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, pixel_values: Tensor, labels: Tensor) -> dict[str, Tensor]:
            logits = self.model(pixel_values)
            return {"loss": F.cross_entropy(logits, labels), "logits": logits}

    class InOrder(Trainer):
        def _get_train_sampler(self, *args: Any) -> Any:
            return torch.utils.data.SequentialSampler(data)

    quiet = {"save_strategy": "no", "report_to": "none", "disable_tqdm": True}
    arguments = TrainingArguments(
        "out", max_steps=4, per_device_train_batch_size=2, use_cpu=True, max_grad_norm=0, **quiet
    )
    wrapped, optimizer = Wrapped(), optimizer_of(model)
    constant = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    rows = [{"pixel_values": image, "labels": label} for image, label in data]
    InOrder(wrapped, arguments, train_dataset=rows, optimizers=(optimizer, constant)).train()


@trainer("composer", "`Trainer.fit` on a `ComposerModel`", "mosaicml==0.32.1")
def by_composer(model: nn.Module, data: TensorDataset) -> None:
    from composer import ComposerModel, Trainer

    class Wrapped(ComposerModel):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, batch: list[Tensor]) -> Tensor:
            return self.model(batch[0])

        def loss(self, outputs: Tensor, batch: list[Tensor]) -> Tensor:
            return F.cross_entropy(outputs, batch[1])

    Trainer(
        model=Wrapped(),
        train_dataloader=DataLoader(data, batch_size=2),
        max_duration="1ep",
        device="cpu",
        optimizers=optimizer_of(model),
        progress_bar=False,
    ).fit()


@trainer("fastai", "`Learner.fit` with SGD", "fastai==2.8.12", one_rate=True)
def by_fastai(model: nn.Module, data: TensorDataset) -> None:
    from fastai.data.core import DataLoaders
    from fastai.learner import Learner
    from fastai.optimizer import OptimWrapper

    loader = DataLoader(data, batch_size=2)
    learner = Learner(
        DataLoaders(loader, loader),
        model,
        loss_func=F.cross_entropy,
        train_bn=True,
        opt_func=lambda groups, **kw: OptimWrapper(groups, torch.optim.SGD, lr=RATES["lr"]),
    )
    learner.fit(1, lr=RATES["lr"])


@trainer("skorch", "`NeuralNetClassifier.fit` with SGD", "skorch==1.4.0", one_rate=True)
def by_skorch(model: nn.Module, data: TensorDataset) -> nn.Module:
    from skorch import NeuralNetClassifier

    how = {"criterion": nn.CrossEntropyLoss, "optimizer": torch.optim.SGD, "lr": RATES["lr"], "batch_size": 2}
    how |= {"max_epochs": 1, "train_split": None, "iterator_train__shuffle": False, "verbose": 0}
    net = NeuralNetClassifier(model, classes=list(range(10)), **how)
    images, labels = data.tensors
    return net.fit(images, labels).module_


@trainer("poutyne", "`Model.fit` with SGD", "poutyne==1.19.0", one_rate=True)
def by_poutyne(model: nn.Module, data: TensorDataset) -> None:
    from poutyne import Model

    Model(model, optimizer_of(model, one_rate=True), "cross_entropy").fit_generator(
        DataLoader(data, batch_size=2), epochs=1, verbose=False
    )


@trainer("timm, ClassificationTask", "the parts of its train.py, with a checkpoint and a resume in between", "timm")
def by_timm(model: nn.Module, data: TensorDataset) -> nn.Module:
    from timm.models import resume_checkpoint
    from timm.optim import create_optimizer_v2
    from timm.task import ClassificationTask
    from timm.utils import CheckpointSaver, NativeScaler

    networks, images_of = (model, copy.deepcopy(model)), list(DataLoader(data, batch_size=2))
    for network, rows in zip(networks, (images_of[:2], images_of[2:]), strict=True):
        groups: Any = recast.param_groups(network, **RATES)
        optimizer = create_optimizer_v2(groups, "momentum", lr=RATES["lr"], weight_decay=0.0, momentum=0.0)
        if network is not model:
            resume_checkpoint(network, "last.pth.tar", optimizer)
        task, scale = ClassificationTask(network, nn.CrossEntropyLoss()), NativeScaler(device="cpu")
        for images, labels in rows:
            optimizer.zero_grad()
            scale(task(images, labels)["loss"], optimizer, parameters=network.parameters())
        CheckpointSaver(network, optimizer).save_checkpoint(0, 1.0)
    return networks[1]


@tool("Lightning, EMAWeightAveraging", "train, then take the average's checkpoint", "lightning==2.6.6")
def by_lightning_average(case: Case) -> Cell:
    from lightning.pytorch.callbacks import EMAWeightAveraging

    model = copy.deepcopy(case.model)
    trainer = fit_by_lightning(model, batches(case), EMAWeightAveraging(decay=0.5))
    trainer.save_checkpoint("average.ckpt")
    state = torch.load("average.ckpt", weights_only=True)["state_dict"]
    average = copy.deepcopy(case.model)
    average.load_state_dict({name.removeprefix("model."): value for name, value in state.items()})
    loaded = copy.deepcopy(case.model)
    path = "plain.pt"
    torch.save(average.state_dict(), path)
    loaded.load_state_dict(torch.load(path, weights_only=True))
    with torch.no_grad():
        return case.judged(loaded.eval()(case.images), model.eval())
