"""Attacks of other packages: FGSM against the sign of the gradient."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from tools import LABELS, Case, Cell, tool
from torch import Tensor

EPS = 2 / 255


def compared(case: Case, attacked: Tensor, pixels: Tensor) -> Cell:
    """Compare with x + ε·sign(gradient)."""
    x = pixels.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(F.cross_entropy(case.model(x), LABELS), x)
    expected = (pixels + EPS * gradient.sign()).clamp(0, 1)
    share = float(((attacked - expected).abs() > 1e-5).float().mean())
    return Cell("exact" if share < 1e-3 else "wrong", share, "error: share of pixels")


@tool("torchattacks", "FGSM", "torchattacks==3.5.1")
def by_torchattacks(case: Case) -> Cell:
    import torchattacks

    pixels = case.images.sigmoid()
    return compared(case, torchattacks.FGSM(copy.deepcopy(case.model), eps=EPS)(pixels, LABELS), pixels)


@tool("foolbox", "FGSM", "foolbox==3.3.4")
def by_foolbox(case: Case) -> Cell:
    import foolbox

    pixels = case.images.sigmoid()
    wrapped = foolbox.PyTorchModel(copy.deepcopy(case.model).eval(), bounds=(0, 1), device="cpu")
    attack = foolbox.attacks.LinfFastGradientAttack()
    return compared(case, attack(wrapped, pixels, LABELS, epsilons=EPS)[0], pixels)


@tool("adversarial-robustness-toolbox", "FGSM by `PyTorchClassifier`", "adversarial-robustness-toolbox==1.20.1")
def by_art(case: Case) -> Cell:
    from art.attacks.evasion import FastGradientMethod
    from art.estimators.classification import PyTorchClassifier

    pixels = case.images.sigmoid()
    classifier = PyTorchClassifier(
        copy.deepcopy(case.model), torch.nn.CrossEntropyLoss(), (3, 96, 96), 10, clip_values=(0, 1), device_type="cpu"
    )
    one_hot = F.one_hot(LABELS, 10).numpy()
    attacked = FastGradientMethod(classifier, eps=EPS).generate(pixels.numpy(), y=one_hot)
    return compared(case, torch.from_numpy(attacked), pixels)


@tool("pyautoattack", "the standard four attacks at 8/255", "pyautoattack==0.2.0")
def by_autoattack(case: Case) -> Cell:
    from pyautoattack import AutoAttack

    pixels, model = case.images.sigmoid(), copy.deepcopy(case.model)
    with torch.no_grad():
        labels = model(pixels).argmax(1)
    attacked = AutoAttack(model, eps=4 * EPS, seed=0).run_standard_evaluation(pixels, labels, batch_size=4)
    attacked = attacked[0] if isinstance(attacked, tuple) else attacked
    with torch.no_grad():
        changed = int((model(attacked).argmax(1) != labels).sum())
    inside = bool(
        ((attacked - pixels).abs() <= 4 * EPS + 1e-6).all() and (attacked >= 0).all() and (attacked <= 1).all()
    )
    return Cell("works" if changed and inside else "wrong", None, f"{changed} of 4 images get another class")
