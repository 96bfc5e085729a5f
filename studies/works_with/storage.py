"""Saving, sharing and tracking by other packages: is the network that comes back the same?"""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import torch
from tools import LAYERS, Case, Cell, tool
from torch import Tensor, nn

import recast


@tool("torch.save", "save and load the whole module", "torch")
def whole(case: Case) -> Tensor:
    torch.save(case.model, "m.pt")
    return torch.load("m.pt", weights_only=False)(case.images).detach()


@tool("safetensors", "`save_model`, `load_model` into a recast network", "safetensors")
def safetensors(case: Case) -> Tensor:
    from safetensors.torch import load_model, save_model

    save_model(case.model, "m.safetensors")
    other = copy.deepcopy(case.model)
    for parameter in other.parameters():
        nn.init.zeros_(parameter)
    load_model(other, "m.safetensors")
    return other(case.images).detach()


@tool("joblib", "`dump`, `load`", "joblib")
def joblib(case: Case) -> Tensor:
    import joblib

    joblib.dump(case.model, "m.joblib")
    return joblib.load("m.joblib")(case.images).detach()


@tool("dill", "`dumps`, `loads`", "dill")
def dill(case: Case) -> Tensor:
    import dill

    return pickle.loads(dill.dumps(case.model))(case.images).detach()


@tool(
    "timm, load_checkpoint",
    "load a state of the recast network into the plain one, `strict=False`",
    "timm",
    remedy={"loses attention": "`recast.load`, or recast the network first: `strict=False` leaves attention out"},
)
def timm_checkpoint(case: Case) -> Cell:
    from timm.models import load_checkpoint

    torch.save({"state_dict": case.model.state_dict()}, "m.pth")
    plain = copy.deepcopy(case.parent)
    load_checkpoint(plain, "m.pth", strict=False)
    return case.judged(plain.eval()(case.images).detach(), case.model)


@tool("huggingface_hub, PyTorchModelHubMixin", "`save_pretrained`, `from_pretrained` of a folder", "huggingface_hub")
def hub(case: Case) -> Tensor:
    import timm
    from huggingface_hub import PyTorchModelHubMixin

    class Mine(nn.Module, PyTorchModelHubMixin):
        def __init__(self, gate: str = "") -> None:
            super().__init__()
            self.net = timm.create_model("resnet18", num_classes=10).eval()
            if gate in LAYERS:
                plan = recast.plan(self.net, case.images, recast.RecastConfig(gate=gate), where=LAYERS[gate])
                recast.recast_(self.net, plan)

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)

    mine = Mine(gate=case.layer)
    mine.net.load_state_dict(case.model.state_dict())
    mine.save_pretrained("folder")
    return Mine.from_pretrained("folder").eval()(case.images).detach()


@tool("mlflow", "`log_model`, `load_model`, in a local folder", "mlflow==3.17.2")
def mlflow(case: Case) -> Tensor:
    import mlflow

    mlflow.set_tracking_uri(f"sqlite:///{Path.cwd()}/{case.layer}.db")
    with mlflow.start_run():
        options: dict[str, Any] = {"serialization_format": "pickle"}
        info = mlflow.pytorch.log_model(case.model, name="model", pip_requirements=["torch"], **options)
    return mlflow.pytorch.load_model(info.model_uri)(case.images).detach()


@tool("wandb", "`watch` in offline mode", "wandb==0.31.0")
def wandb(case: Case) -> Cell:
    import wandb

    with wandb.init(mode="offline", dir=".", project="p") as run:
        model = copy.deepcopy(case.model)
        run.watch(model, log="all", log_freq=1)
        model(case.images).square().mean().backward()
        run.log({"loss": 0.0})
    return Cell("works")


@tool("tensorboard", "`add_graph`, histograms of parameters", "tensorboard==2.21.0")
def tensorboard(case: Case) -> Cell:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter("log")
    writer.add_graph(case.model, case.images[:1])
    for name, parameter in case.model.named_parameters():
        writer.add_histogram(name, parameter, 0)
    writer.close()
    return Cell("works")
