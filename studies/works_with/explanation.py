"""Explanations by other packages, against what they are defined to be."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from tools import Case, Cell, relative, tool
from torch import Tensor

CLASS = 3


def block_cam(case: Case) -> tuple[int, Tensor]:
    """Return a class and its Grad-CAM at the last block, before any scaling, (4, 3, 3), zero on no image."""
    features: list[Tensor] = []
    handle = case.model.layer4[-1].register_forward_hook(lambda module, args, output: features.append(output))
    logits = case.model(case.images)
    handle.remove()
    for number, score in enumerate(logits.sum(0)):
        (gradient,) = torch.autograd.grad(score, features[0], retain_graph=True)
        maps = (gradient.mean((2, 3), keepdim=True) * features[0]).sum(1).relu().detach()
        if maps.amax((1, 2)).min() > 0:
            return number, maps
    raise AssertionError("the map of every class is zero on an image")


@tool("grad-cam, GradCAM", "the map of the last block", "grad-cam==1.5.7")
def grad_cam(case: Case) -> Cell:
    from pytorch_grad_cam import GradCAM
    from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget

    number, own = block_cam(case)
    with GradCAM(case.model, [case.model.layer4[-1]]) as cam:
        maps = torch.from_numpy(cam(case.images, [ClassifierOutputTarget(number)] * 4))
    own = F.interpolate(own[:, None], (96, 96), mode="bilinear")[:, 0]
    own = own - own.amin((1, 2), keepdim=True)
    expected = own / own.amax((1, 2), keepdim=True).clamp(min=1e-7)
    error = relative(maps, expected)
    return Cell("exact" if error < 1e-3 else "works" if error < 0.1 else "wrong", error, "after its scaling to 0 … 1")


@tool("grad-cam, AblationCAM", "the map of the recast layer itself", "grad-cam==1.5.7")
def ablation_cam(case: Case) -> Cell:
    from pytorch_grad_cam import AblationCAM
    from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget

    model = copy.deepcopy(case.model)  # the package replaces the layer
    with AblationCAM(model, [model.layer4[-1].conv2]) as cam:
        maps = cam(case.images[:1], [ClassifierOutputTarget(CLASS)])
    return Cell("works" if maps.shape == (1, 96, 96) else "wrong")


def completeness(case: Case, delta: Tensor) -> Cell:
    """Judge by how far attributions, whose sum is `delta` off, miss the difference of the logits to a black image."""
    with torch.no_grad():
        change = (case.model(case.images) - case.model(case.images * 0))[:, CLASS]
    error = relative(delta + change, change)
    return Cell("exact" if error < 1e-3 else "works" if error < 0.1 else "wrong", error)


@tool("captum, IntegratedGradients", "attributions, against x times the mean gradient between 0 and x", "captum==0.9.0")
def integrated(case: Case) -> Cell:
    from captum.attr import IntegratedGradients

    steps, total = 16, torch.zeros_like(case.images)
    for k in range(1, steps + 1):
        x = (case.images * k / steps).requires_grad_()
        total += torch.autograd.grad(case.model(x)[:, CLASS].sum(), x)[0]
    maps = IntegratedGradients(case.model).attribute(
        case.images, target=CLASS, n_steps=steps, method="riemann_right", internal_batch_size=4
    )
    error = relative(maps.detach().float(), case.images * total / steps)
    with torch.no_grad():
        change = (case.model(case.images) - case.model(case.images * 0))[:, CLASS]
    missed = relative(maps.detach().float().sum((1, 2, 3)), change)
    return Cell(
        "exact" if error < 1e-4 else "wrong", error, f"{steps} steps; their sum misses the logit's by {missed:.2f}"
    )


@tool("captum, LayerGradCam", "the map of the last block", "captum==0.9.0")
def layer_grad_cam(case: Case) -> Cell:
    from captum.attr import LayerGradCam

    number, own = block_cam(case)
    maps = LayerGradCam(case.model, case.model.layer4[-1]).attribute(case.images, target=number, relu_attributions=True)
    error = relative(maps[:, 0].detach(), own)
    return Cell("exact" if error < 1e-4 else "wrong", error)


@tool(
    "captum, DeepLift",
    "attributions; their sum is the difference of the logits",
    "captum==0.9.0",
    remedy={"wrong": "its rules know no attention: `IntegratedGradients`"},
)
def deep_lift(case: Case) -> Cell:
    from captum.attr import DeepLift

    _, delta = DeepLift(copy.deepcopy(case.model)).attribute(
        case.images, case.images * 0, target=CLASS, return_convergence_delta=True
    )
    return completeness(case, delta.detach())


@tool("torchcam, GradCAM", "the map of the last block", "torchcam==0.5.0")
def torch_cam(case: Case) -> Cell:
    from torchcam.methods import GradCAM

    number, own = block_cam(case)
    with GradCAM(case.model, "layer4") as cam:
        scores = case.model(case.images)
        (maps,) = cam([number] * 4, scores)
    own = own - own.amin((1, 2), keepdim=True)
    error = relative(maps.detach(), own / own.amax((1, 2), keepdim=True).clamp(min=1e-7))
    return Cell("exact" if error < 1e-3 else "wrong", error, "after its scaling to 0 … 1")


@tool(
    "zennit, EpsilonPlus",
    "relevance, BatchNorm merged by `SequentialMergeBatchNorm`",
    "zennit==0.5.1",
    remedy=dict.fromkeys(
        ("wrong", "works", "loses attention"), "`fold_(…, batch_norm=True)` first, and no canonizer there"
    ),
)
def zennit(case: Case) -> Cell:
    from zennit.canonizers import SequentialMergeBatchNorm
    from zennit.composites import EpsilonPlus

    model = copy.deepcopy(case.model)
    with EpsilonPlus(canonizers=[SequentialMergeBatchNorm()]).context(model) as inside, torch.no_grad():
        outputs = inside(case.images)
    return case.judged(outputs, message="error: of the network while BatchNorm is merged")


@tool("shap, GradientExplainer", "expected gradients", "shap==0.51.0")
def shap(case: Case) -> Cell:
    import shap

    explainer = shap.GradientExplainer(copy.deepcopy(case.model), case.images * 0)
    values = explainer.shap_values(case.images[:1], nsamples=200)
    total = torch.as_tensor(values)[0, ..., CLASS].sum()
    with torch.no_grad():
        change = (case.model(case.images[:1]) - case.model(case.images[:1] * 0))[0, CLASS]
    error = float((total - change).abs() / change.abs())
    return Cell("works" if error < 0.3 else "wrong", error, "200 draws; error: of their sum")


@tool(
    "shap, DeepExplainer",
    "DeepLIFT's rules",
    "shap==0.51.0",
    remedy={"refused": "its rules know no attention: `GradientExplainer`"},
)
def shap_deep(case: Case) -> Cell:
    import shap

    explainer = shap.DeepExplainer(copy.deepcopy(case.model), case.images * 0)
    values = torch.as_tensor(explainer.shap_values(case.images[:1], check_additivity=True))[0, ..., CLASS].sum()
    with torch.no_grad():
        change = (case.model(case.images[:1]) - case.model(case.images[:1] * 0))[0, CLASS]
    error = float((values - change).abs() / change.abs())
    return Cell("exact" if error < 1e-2 else "wrong", error)


@tool("torchlens", "log every operation of a pass", "torchlens==2.36.1")
def torch_lens(case: Case) -> Cell:
    import torchlens

    log = torchlens.trace(copy.deepcopy(case.model), case.images[:1])
    names = [str(layer) for layer in log.layer_labels]
    return Cell("works", None, f"{len(names)} operations, {sum('softmax' in name for name in names)} of them softmax")


@tool("torchview", "draw the network", "torchview==0.2.7", "graphviz==0.21")
def torch_view(case: Case) -> Cell:
    from torchview import draw_graph

    drawn = draw_graph(copy.deepcopy(case.model), input_data=case.images[:1], depth=4)
    source = str(drawn.visual_graph.source)
    kind = {"beside": "AttentionBeside", "linear": "GPSA", "parent": "Conv2d"}[case.layer]
    return Cell(
        "works" if kind in source or "Conv2d" in source else "wrong", None, f"{kind} in the drawing: {kind in source}"
    )


NO_TOKENS = {"refused": "`recast.record` gives the maps; rollout is defined for the tokens of transformers"}


@tool("timm, AttentionExtract", "the attention maps", "timm", remedy=NO_TOKENS, is_own=True)
def attention_extract(case: Case) -> Cell:
    from timm.utils import AttentionExtract

    maps = AttentionExtract(copy.deepcopy(case.model), method="hook")(case.images)
    return Cell("works" if maps else "wrong", None, f"{len(maps)} maps")


@tool(
    "fast-vit-rollout",
    "attention rollout",
    "fast-vit-rollout==0.1.1",
    "opencv-python-headless",
    remedy=NO_TOKENS,
    is_own=True,
)
def rollout(case: Case) -> Cell:
    from fast_vit_rollout.vit_rollout import ViTAttentionRollout

    extractor = ViTAttentionRollout(copy.deepcopy(case.model))
    extractor.model(case.images[:1])
    return Cell("works", None, f"{extractor._compute_rollout().shape}")
