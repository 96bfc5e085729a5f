"""Optimiser, regularisation and distillation, as plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from recast.fields import (
    BelowOne,
    Checked,
    Classes,
    Count,
    NotNegative,
    Pixels,
    Positive,
    Probability,
    Share,
    Width,
)

Freeze = Literal["none", "trunk", "all_but_attention", "all_but_batch_norm"]


@dataclass
class OptimConfig(Checked, prefix="optim."):
    """Optimiser and schedule: AdamW, linear warm-up, cosine or polynomial decay."""

    opt: str = "adamw"
    """Any optimiser of timm."""
    lr: NotNegative = 1e-4
    """Peak learning rate."""
    base_batch: Count | None = None
    """lr is for this many images an update and scales linearly with data.batch_size. None: lr is taken as it is."""
    gate_lr: NotNegative | None = None
    """Peak learning rate of the gates. None: 50 x lr (as scaled) for γ and s, 0.1 for the sigmoid's λ (T-CNN), that of
    the weights for λ where a schedule recasts during training (T-CNN*)."""
    qk_lr: NotNegative | None = None
    """Peak learning rate of recast layers' queries and keys, as it is (never scaled). None: that of the weights."""
    pool_lr: NotNegative | None = None
    """Peak learning rate of attention pooling, as it is (never scaled). None: that of the weights."""
    weight_decay: NotNegative = 0.05
    """Decay of weights; never of gates, Δ, α, W_val, biases and norms."""
    layer_decay: Share | None = None
    """Learning rate of a layer: this to the power of its distance from the head. None: 1."""
    momentum: BelowOne = 0.9
    """Momentum, for optimisers that have one."""
    betas: tuple[BelowOne, BelowOne] | None = None
    """Adam's and LAMB's decay rates of the moments. None: the optimiser's own."""
    eps: Positive | None = None
    """Adam's and LAMB's ε. None: the optimiser's own."""
    warmup_epochs: NotNegative = 1.0
    """Epochs of linear warm-up."""
    warmup_lr: NotNegative = 1e-6
    """Learning rate at step 0."""
    min_lr: NotNegative = 1e-6
    """Learning rate at the end."""
    warmup_prefix: bool = True
    """The cosine begins after the warm-up. Off: at step 0, the warm-up covers its first part (DeiT's schedule)."""
    decay: Literal["cosine", "poly", "linear", "steps"] = "cosine"
    """How the rate falls after the warm-up. poly: by what is left of the updates, to the power of 0.9 (DeepLab).
    linear: of 1 (Swin). steps: to a tenth at 3/4 of them and again at 11/12 (COCO's 3× schedule)."""
    clip_grad: Positive | None = None
    """Clip the gradient's norm at this value. None: not at all, also in LAMB (whose own default is 1)."""
    gate_l1: NotNegative = 0.0
    """L1 on γ and s by a soft threshold after each step: heads that do not earn their cost close at exactly 0."""


@dataclass
class RegularizationConfig(Checked, prefix="regularization."):
    """Loss and regularisation of the network; what is done to its images is `augment`."""

    loss: Literal["ce", "bce"] = "ce"
    """ce: softmax cross-entropy. bce: binary cross-entropy of every class (RSB, DeiT III)."""
    bce_threshold: BelowOne | None = None
    """bce: targets above it become 1, others 0 (DeiT III: 0, so that both mixed classes count fully)."""
    label_smoothing: BelowOne = 0.0
    """Share of a label that is spread over all classes."""
    drop_path: BelowOne | None = None
    """Stochastic depth: probability that a residual branch is left out. None: as the network was built."""
    drop_path_mode: Literal["linear", "uniform"] = "linear"
    """linear: from 0 at the first block to drop_path at the last; uniform: the same in every block."""
    layer_scale: NotNegative | None = None
    """Value that the network's LayerScale starts with. None: as the network was built."""
    init_std: Positive | None = None
    """Draw the weights of linear layers and tokens anew with this standard deviation, as DeiT does (0.02), all else as
    torch does. None: as the network was built."""
    freeze: Freeze = "none"
    """trunk: only attention pooling and the classifier train (in the control arm the classifier); everything else keeps
    its weights and BatchNorm statistics and drops nothing. all_but_batch_norm: as trunk, and BatchNorm trains and
    measures (FixRes). all_but_attention: attention trains too, recast layers and transformers' own; other BatchNorm
    keeps its statistics."""
    freeze_bn: bool = False
    """BatchNorm normalises with its stored statistics and does not update them."""
    ema_decay: BelowOne | None = None
    """Keep an exponential moving average of the weights, evaluate and save it."""


@dataclass
class EmbeddingConfig(Checked, prefix="embedding."):
    """An embedding of images, for neighbours and retrieval, with labels or without.

    With: Grafit (Touvron et al. 2021); without: DINO (Caron et al. 2021)."""

    projector: Literal["none", "linear", "mlp", "dino"] = "none"
    """none: no embedding, the labels alone. linear: one layer (Grafit FC). mlp: two with a ReLU between (Grafit). dino:
    the features themselves, which learn without labels by DINO's loss over dim prototypes."""
    dim: Classes = 256
    """Width of the embedding; dino: prototypes."""
    hidden: Width = 4096
    """Width between the layers of the mlp, and of the predictor that the loss of instances needs."""
    label_weight: NotNegative = 0.0
    """Weight of the loss of labels. 0: the classifier learns beside, as a probe that moves nothing else."""
    knn_weight: NotNegative = 1.0
    """Weight of the loss of neighbours: softmax over all training images, those of the class are right (SNCA)."""
    instance_weight: NotNegative = 1.0
    """Weight of the loss of instances: views of an image agree with those of a moving average of the network (BYOL)."""
    views: Count = 4
    """Views of each image in an update; the losses of labels and of neighbours see the first."""
    sigma: Positive = 0.05
    """Temperature of the loss of neighbours."""
    target_decay: Probability = 0.996
    """Decay of the moving average at the start; it rises to 1 by a cosine."""
    local_scale: tuple[Share, Share] = (0.05, 0.4)
    """dino: share of the image's area that the views after the second show, enlarged to the size of the others."""
    teacher_temperature: Positive = 0.04
    """dino: temperature of the moving average's outputs; that of the network's is 0.1."""

    @property
    def is_on(self) -> bool:
        """An embedding is learnt."""
        return self.projector != "none"


@dataclass
class DistillConfig(Checked, prefix="distill."):
    """A teacher beside the labels (DeiT, Touvron et al. 2021); it sees the images as the student does."""

    name: str | None = None
    """parent: the network that was recast. Or a model's name. None: no teacher."""
    teacher_checkpoint: str | None = None
    """Weights of the teacher, .safetensors or .pth."""
    teacher_pretrained: bool = False
    """Let timm or torchvision fetch the teacher's weights."""
    targets: Literal["soft", "hard"] = "soft"
    """soft: KL divergence to the teacher at a temperature. hard: cross-entropy with the class it decides on."""
    teacher_weight: Probability = 0.5
    """Share of the teacher's term; the labels' has the rest. With a distillation token each has its own head."""
    temperature: Positive = 3.0
    """soft: temperature τ of both distributions; the term is scaled by τ²."""
    reduction: Literal["batchmean", "numel"] = "batchmean"
    """soft: mean over the batch, or over batch and classes as in DeiT's published code (C times weaker)."""
    teacher_size: Pixels | None = None
    """Side that images are resized to for the teacher. None: the student's."""
    feature_epochs: NotNegative = 0.0
    """Warm-up with the parent as teacher: for so long only the recast layers train, each to give what its convolution
    gives in the parent; the labels come after it."""
