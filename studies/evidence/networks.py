"""The networks of a study: built, recast, folded. They take pixels in [0, 1]."""

from __future__ import annotations

from pathlib import Path

import timm
import torch
from safetensors.torch import load_file
from studies import Job
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.transforms.v2.functional import normalize

import recast
import recast.papers.networks  # registers them
from recast.lab.data.datasets import ImageTensors
from recast.lab.data.seeding import choose_balanced
from recast.lab.training.switches import WAKING_IMAGES
from recast.layers.config import PAPERS_LAYER, RecastConfig
from recast.models.build import build, input_defaults
from recast.models.config import ModelConfig
from recast.surgery.plan import Plan
from recast.surgery.stride import Edit, apply_edits_

CLASSES = {"cifar10": 10, "cifar100": 100}
PLAIN_VIT = {"img_size": 32, "patch_size": 4, "embed_dim": 60, "depth": 6, "num_heads": 3}
"""Depth and patches of `cmhsa_vit_3_tiny`, and about its 0.27 M parameters once recast."""


class Prepared(nn.Module):
    """A network that resizes and normalises its images first."""

    def __init__(self, network: nn.Module, size: int) -> None:
        super().__init__()
        self.network, self.size = network, size
        defaults = input_defaults(network)
        self.mean, self.std = (list(defaults.mean), list(defaults.std)) if defaults else ([0.5] * 3, [0.5] * 3)

    def prepare(self, pixels: Tensor) -> Tensor:
        """Return resized and normalised images."""
        if pixels.shape[-1] != self.size:
            pixels = F.interpolate(pixels, size=(self.size, self.size), mode="bicubic", antialias=True).clamp(0, 1)
        return normalize(pixels, self.mean, self.std).contiguous(memory_format=torch.channels_last)

    def forward(self, pixels: Tensor) -> Tensor:
        """Return logits of pixels (B, 3, H, W) in [0, 1]."""
        return self.network(self.prepare(pixels))  # type: ignore[no-any-return]


def parent_of(job: Job, out: Path, root: Path) -> Prepared:
    """Return the network that all arms of a seed start from; the seed draws a new head."""
    classes = CLASSES[job.data]
    torch.manual_seed(job.seed)
    if job.network == "plain_vit_tiny":
        return Prepared(timm.create_model("vit_tiny_patch16_224", num_classes=classes, **PLAIN_VIT), job.size)
    weights = None
    if job.parent is not None and "/" not in job.parent:
        weights = str(root / "weights" / job.parent)
    config = ModelConfig(job.network, weights, new_head=weights is not None and job.parent_data != job.data)
    model = Prepared(build(config, num_classes=classes), job.size)
    if job.parent is not None and "/" in job.parent:
        study, arm = job.parent.split("/")
        seed = 0 if job.tuning else job.seed  # rates are chosen on the first parent
        model.load_state_dict(load_file(out / study / f"{arm}-{seed}" / "weights.safetensors"))
    return model


def plan_for(job: Job, model: Prepared) -> Plan | None:
    """Return the plan of the layers that become attention. Without any, remove the stride if the job says so."""
    if job.where is None:
        if job.stride == "remove":
            strided = [name for name, module in model.network.named_modules() if hasattr(module, "stride")]
            apply_edits_(model.network, (Edit(name, "stride_1") for name in strided if name.startswith("layer3")))
        return None
    config = RecastConfig(
        gate=job.gate, query_key=job.query_key, logit_std=job.logit_std, stride=job.stride, **PAPERS_LAYER
    )
    if job.gate == "bias":
        config = RecastConfig(gate="bias", bias_init=10.0)
    example = torch.zeros(1, 3, job.size, job.size, device=next(model.parameters()).device)
    return recast.plan(model.network, example, config, where=job.where if "*" not in job.where else [job.where])


def wake(job: Job, model: Prepared, train: ImageTensors, layers: tuple[str, ...]) -> None:
    """Start queries and keys of `layers` from training images, if the job says so."""
    if job.query_key != "images" or not layers:
        return
    count = min(WAKING_IMAGES, len(train))
    index = choose_balanced(train.labels.cpu(), count, "waking images", job.seed).to(train.pixels.device)
    batches = (model.prepare(pixels.float() / 255) for pixels in train.pixels[index].split(128))
    recast.wake_(model.network, batches, job.logit_std, job.seed, layers)


def fold_all(model: Prepared, images: ImageTensors) -> None:
    """Turn a trained network into its convolutions alone, in place.

    All gates are closed, however far they were open, and BatchNorm's statistics are estimated again.
    """
    recast.fold_(model.network, tol=float("inf"))
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.reset_running_stats()
            module.momentum = None  # the mean of all batches
    model.train()
    with torch.no_grad():
        for pixels in images.pixels[:2048].split(256):
            model(pixels.float() / 255)
