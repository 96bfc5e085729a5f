"""What a run is, as plain data: no torch in here, so that the command line starts fast.

A `Recipe` is complete: written to `recipe.yaml`, it replays the run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal, get_args

from recast.errors import RecastError, suggest

Gate = Literal["linear", "sigmoid"]
Backend = Literal["auto", "reference", "dense", "split", "merged"]
Content = Literal["softmax", "linear"]
StrideMode = Literal["keep", "remove", "dilate"]


@dataclass(frozen=True)
class RecastConfig:
    """How a convolution becomes gated positional self-attention (GPSA)."""

    gate: Gate = "linear"
    """linear: starts as exactly the convolution. sigmoid: the gate of the T-CNN paper (Eq. 7)."""
    alpha: float = 1.0
    """Locality strength α > 0 of the Gaussian heads at the start; 1/α is the attention span."""
    lambda_init: float = 1.0
    """Sigmoid gate only: λ at the start; σ(λ) is the share of positional attention."""
    gamma_init: float = 0.0
    """Linear gate only: share γ of content attention at the start; 0 is exact."""
    s_init: float = 0.0
    """Linear gate only: spread s (one-hot shift to Gaussian) at the start; 0 is exact."""
    gate_range: tuple[float, float] | None = None
    """Linear gate only: clamp γ and s, e.g. (0, 1) keeps every map a convex mix. None: free reals."""
    head_dim: int | None = None
    """Width D_h of a head's queries and keys. None: max(1, C_in // heads); about 8 in grouped and depthwise layers."""
    content: Content = "softmax"
    """softmax: the paper's. linear: cost linear in the tokens, for early stages (efficient attention, rank D_h)."""
    keep_parametrization: bool = False
    """Keep what makes the kernel (weight standardisation, weight or spectral norm) over W_out. Off: take its result."""
    stride: StrideMode = "keep"
    """keep: exact. remove: the paper's stride 1. dilate: as remove, with the layers after it dilated to match."""
    attend_padding: bool = False
    """Let content attention see the padding tokens (the paper's literal reading)."""
    backend: Backend = "auto"
    """Which code computes the layer: they agree to rounding."""

    def __post_init__(self) -> None:
        for name, allowed in (("gate", Gate), ("content", Content), ("stride", StrideMode), ("backend", Backend)):
            value, options = getattr(self, name), get_args(allowed)
            if value not in options:
                raise RecastError(
                    f"{name} must be one of {', '.join(options)}, got {value!r}.{suggest(value, options)}"
                )
        if not (math.isfinite(self.alpha) and self.alpha > 0):
            raise RecastError(f"alpha must be a positive number (locality strength), got alpha={self.alpha}")
        if self.head_dim is not None and self.head_dim < 1:
            raise RecastError(f"head_dim must be at least 1, got head_dim={self.head_dim}")
        for name in ("lambda_init", "gamma_init", "s_init"):
            if not math.isfinite(getattr(self, name)):
                raise RecastError(f"{name} must be finite, got {getattr(self, name)}")
        if self.gate == "sigmoid" and (self.gamma_init, self.s_init, self.gate_range) != (0.0, 0.0, None):
            raise RecastError(
                "gamma_init, s_init and gate_range belong to gate='linear'; gate='sigmoid' takes lambda_init"
            )
        if self.gate == "linear" and self.lambda_init != 1.0:
            raise RecastError("lambda_init belongs to gate='sigmoid'; gate='linear' takes gamma_init and s_init")
        if self.gate_range is not None:
            low, high = self.gate_range
            if not low < high:
                raise RecastError(f"gate_range must be (low, high) with low < high, got {self.gate_range}")
            if not (low <= self.gamma_init <= high and low <= self.s_init <= high):
                raise RecastError(f"gamma_init and s_init must lie in gate_range {self.gate_range}")


@dataclass
class ModelConfig:
    """The parent: a trained convolutional network."""

    name: str = "resnet18"
    """timm:NAME (or NAME), torchvision:NAME, or pkg.module:function."""
    checkpoint: str | None = None
    """Weights of the parent, .safetensors or .pth (never unpickled)."""
    pretrained: bool = False
    """Let timm or torchvision fetch its pretrained weights."""
    num_classes: int | None = None
    """Classes of the head; None: the model's own, or the data set's when training."""


@dataclass
class DataConfig:
    """Images and how they are prepared. Pixels are in [0, 1]; normalisation happens next to the model."""

    name: str = "digits"
    """digits, cifar10, cifar100, imagenet, folder, or zip (an ImageFolder tree, or a zip of one)."""
    data_dir: str | None = None
    """Folder with train/ and val/ (or test/), with train.zip and test.zip, or a .zip. None: $RECAST_DATA/NAME."""
    img_size: int | None = None
    """Side in pixels. None: 32 for digits and CIFAR, a zip's own (at most 224), 224 otherwise."""
    augment: Literal["none", "crop", "crop_flip", "imagenet"] | None = None
    """Augmentation. None: crop for digits, crop_flip for CIFAR and zips of small images, imagenet otherwise."""
    mean: tuple[float, ...] | None = None
    """Per-channel mean of the normalisation in [0, 1] pixels. None: what the network was trained with, if it says so
    (timm's do), else the data set's own."""
    std: tuple[float, ...] | None = None
    """Per-channel standard deviation of the normalisation. None: as for the mean."""
    batch_size: int = 128
    """Images a step."""
    workers: int = 0
    """Loader processes; 0 is fastest for small images held in memory."""
    num_train: int | None = None
    """Use only this many training images (class-balanced, seeded)."""
    num_val: int | None = None
    """Use only this many validation images (class-balanced, seeded)."""


@dataclass
class OptimConfig:
    """Optimiser and schedule: AdamW, linear warm-up, cosine."""

    opt: str = "adamw"
    """Any optimiser of timm."""
    lr: float = 1e-4
    """Peak learning rate."""
    gate_lr: float | None = None
    """Peak learning rate of the gates. None: 10 x lr for γ and s, 0.1 for the sigmoid's λ (the paper's)."""
    weight_decay: float = 0.05
    """Decay of weights; never of gates, Δ, α, W_val, biases and norms."""
    warmup_epochs: float = 1.0
    """Epochs of linear warm-up."""
    warmup_lr: float = 1e-6
    """Learning rate at step 0."""
    min_lr: float = 1e-6
    """Learning rate at the end."""
    clip_grad: float | None = None
    """Clip the gradient's norm at this value."""
    gate_l1: float = 0.0
    """L1 on γ and s by a soft threshold after each step: heads that do not earn their cost close at exactly 0."""


@dataclass
class Recipe:
    """One run, complete: which parent, which data, what becomes attention, how it is trained."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    recast: RecastConfig = field(default_factory=RecastConfig)
    where: list[str] = field(default_factory=lambda: ["last_stage"])
    """Layers to recast: last_stage, all, stage:N, names, globs, re:REGEX."""
    budget: str = "tokens=1024"
    """Limits of a plan: tokens=N per layer; macs=, params=, memory= of the recast model (1.3x, 5G, 64MiB)."""
    calibrate: int = 0
    """Sigmoid gate: solve W_out on this many training images right after the recast; 0: the paper's start."""
    optim: OptimConfig = field(default_factory=OptimConfig)
    epochs: int = 5
    """Passes over the training images."""
    label_smoothing: float = 0.0
    """Label smoothing of the cross-entropy."""
    amp: Literal["off", "bf16", "fp16"] = "off"
    """Mixed precision."""
    ema_decay: float | None = None
    """Keep an exponential moving average of the weights, evaluate and save it."""
    control: bool = True
    """Also train the parent itself the same way: without this arm a gain proves nothing."""
    seed: int = 0
    """Seed of weights, order and augmentation."""
    device: str = "auto"
    """auto, cpu, cuda or mps."""

    def __post_init__(self) -> None:
        if self.epochs < 0:
            raise RecastError(f"epochs must be 0 or more, got {self.epochs}")
        if self.calibrate and self.recast.gate != "sigmoid":
            raise RecastError("calibrate is for gate='sigmoid': the linear gate already starts as the parent itself")
