"""Suites `fgsm`, `pgd` and `autoattack`: white-box L∞ attacks on pixels in [0, 1], the normalisation inside the model.

ε is in 1/255. FGSM: x' = clip(x + ε·sign ∇ₓL). PGD: that step with size η, `steps` times, each time projected on the
ε-ball around x and on [0, 1]. At ε = 0 both return x itself: the accuracy is the clean one.
Goodfellow et al. 2015 (arXiv:1412.6572); Madry et al. 2018 (arXiv:1706.06083). Defaults: T-CNN (d'Ascoli et al. 2021),
5 steps of 0.5 at ε = 1, no random start. AutoAttack: Croce & Hein 2020 (arXiv:2003.01690), of the package pyautoattack.
"""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from recast.errors import RecastError, optional_package
from recast.lab.config.evaluation import Options
from recast.lab.data.seeding import mix_seed, seeded_on
from recast.lab.evaluation.context import Batch, Context, NotMeasured, Score, Source, is_correct, loss_gradient

TARGETS = 9
"""Classes that AutoAttack's targeted attacks aim at."""
MIN_CLASSES = 4
"""AutoAttack's targeted DLR loss compares with the fourth largest logit."""


def pgd(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    eps: float,
    *,
    steps: int = 5,
    step_size: float | None = None,
    noise: Tensor | None = None,
    gradient: Tensor | None = None,
) -> Tensor:
    """Projected gradient ascent in the ε-ball; ε and `step_size` are in 1/255, step_size None is 2.5·ε/steps.

    `model` takes pixels (B, C, H, W) in [0, 1] and should be in eval mode. One step of size ε is FGSM.
    noise: (B, C, H, W) in [-1, 1], the start in the ball in units of ε; None starts at the images, where `gradient` is
    ∇ₓ if it is known already.
    """
    if steps < 1:
        raise RecastError(f"pgd needs at least 1 step, got steps={steps}")
    if eps == 0:
        return images
    radius, step = eps / 255, (2.5 * eps / steps if step_size is None else step_size) / 255
    low, high = (images - radius).clamp(min=0), (images + radius).clamp(max=1)
    attacked = images if noise is None else torch.clamp(images + radius * noise, low, high)
    for number in range(steps):
        known = gradient if number == 0 and noise is None else None
        uphill = loss_gradient(model, attacked, labels) if known is None else known
        attacked = torch.clamp(attacked + step * uphill.sign(), low, high)
    return attacked


def score_fgsm(batch: Batch) -> Iterator[Score]:
    """top1@ε for every ε; no_gradient: where ∇ₓ is zero, an attack finds no way and robustness is not shown."""
    yield from score_pgd(batch, Options(eps=batch.options.eps, steps=1))
    for name in batch.models:
        yield Score(name, "no_gradient", (batch.gradient(name).flatten(1) == 0).all(1).float())


def score_pgd(batch: Batch, options: Options | None = None) -> Iterator[Score]:
    """top1@ε for every ε: correct under every restart; options: others than the batch's."""
    options = options or batch.options
    for name, model in batch.models.items():
        attack = partial(pgd, model, batch.images, batch.labels, steps=options.steps, step_size=options.step_size)
        for eps in options.eps:
            survived = torch.ones(len(batch), device=batch.images.device)
            for start in range(options.restarts):
                if options.random_start or start > 0:
                    attacked = attack(eps, noise=_noise(batch, start))
                else:
                    attacked = attack(eps, gradient=batch.gradient(name))
                survived *= batch.is_correct(name, attacked)
            yield Score(name, f"top1@{eps:g}", survived)


def _noise(batch: Batch, start: int) -> Tensor:
    """Uniform in [-1, 1], the same for an image whatever else is in its batch."""
    seeds = (mix_seed("pgd", batch.options.seed, start, index) for index in batch.indices)
    drawn = [torch.rand(batch.images.shape[1:], generator=torch.Generator().manual_seed(seed)) for seed in seeds]
    return (2 * torch.stack(drawn) - 1).to(batch.images)


def auto_attack(model: nn.Module, images: Tensor, labels: Tensor, eps: float, classes: int, *, seed: int = 0) -> Tensor:
    """Attacked pixels (B, C, H, W) within ε (in 1/255) of `images` and in [0, 1]; unchanged where no attack succeeded.

    The standard ensemble: APGD on the cross-entropy, targeted APGD on the DLR loss, targeted FAB (nine target classes
    each) and Square (5,000 queries), one after the other: thousands of passes for each image.

    `model` takes pixels and should be in eval mode; its parameters get no gradient, the global random generators are
    restored. The random numbers follow from `seed` and from the other images of the batch.
    """
    tracer = sys.gettrace()
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with seeded_on(images.device, seed), contextlib.redirect_stdout(io.StringIO()):
        for parameter in trainable:  # FAB calls backward
            parameter.requires_grad_(False)
        try:
            attack = _package()(
                model, norm="Linf", eps=eps / 255, version="standard", device=images.device, seed=seed % 2**32
            )
            attack.fab.n_target_classes = attack.apgd_targeted.n_target_classes = min(TARGETS, classes - 1)
            attacked: Tensor = attack.run_standard_evaluation(images, labels, batch_size=len(images))[0]
        finally:
            for parameter in trainable:
                parameter.requires_grad_(True)
            sys.settrace(tracer)  # one of its checks ends a debugger's or a coverage tool's
    return attacked.detach()


def _package() -> Any:
    what = "AutoAttack comes with pyautoattack"
    return optional_package("pyautoattack", "pyautoattack", what, NotMeasured).AutoAttack


def sources_autoattack(context: Context) -> list[Source]:
    """The validation images; NotMeasured without the package."""
    _package()
    if len(context.data.classes) < MIN_CLASSES:
        raise RecastError(
            f"autoattack needs data with at least {MIN_CLASSES} classes, {context.data.name} has "
            f"{len(context.data.classes)}: use pgd"
        )
    return [context.validation]


def score_autoattack(batch: Batch) -> Iterator[Score]:
    """top1@ε for every ε."""
    classes = len(batch.context.data.classes)
    for name, model in batch.models.items():
        survived = batch.is_correct(name)
        left = survived.bool()
        for eps in batch.options.eps:
            score = survived.clone()
            if eps > 0 and left.any():
                seed = mix_seed("autoattack", batch.options.seed, batch.first)
                attacked = auto_attack(model, batch.images[left], batch.labels[left], eps, classes, seed=seed)
                score[left] = is_correct(batch.logits(name, attacked), batch.labels[left])
            yield Score(name, f"top1@{eps:g}", score)
