"""Run every form of the layers, pooling and training steps on a made-up device: is every tensor made where it belongs?

    python tests/layers/fake_card.py        # one line per failing case, then how many ran

`FakeTensorMode` computes shapes, dtypes and devices without data, forward and backward, and refuses to mix devices.
"cuda" would do without a backward pass only: autograd asks a CUDA device for its context. torch's Python backend
(experimental) has a device guard instead.
"""

from __future__ import annotations

import copy
import itertools
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import timm
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

import recast
import recast.papers.networks  # registers the networks
from recast.lab.evaluation.attacks import pgd
from recast.surgery.rules import convert

CARD = "card"

Case = tuple[str, nn.Module, tuple[int, ...], torch.dtype]


def on_card(model: nn.Module, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Put fake parameters and buffers on the card in place of a model's, as `model.to(device, dtype)` would."""
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    kind = dtype if tensor.is_floating_point() else tensor.dtype
                    fake: Tensor = torch.empty(tensor.shape, dtype=kind, device=CARD)
                    tensors[name] = nn.Parameter(fake, tensor.requires_grad) if tensors is module._parameters else fake
    return model


def layers() -> Iterator[Case]:
    """Every pair of a geometry, a form, a gate or kind of content, and a dtype; all heads' and one head's layers."""
    convolutions = {
        "3x3": nn.Conv2d(8, 8, 3, padding=1), "stride": nn.Conv2d(8, 12, (5, 3), 2, (2, 1), bias=False),
        "reflect": nn.Conv2d(8, 8, 3, padding=1, padding_mode="reflect"),
        "dilated": nn.Conv2d(8, 8, 3, padding=2, dilation=2), "depthwise": nn.Conv2d(8, 8, 3, padding=1, groups=8),
        "transposed": nn.ConvTranspose2d(8, 8, 3, 2, 1),
    }  # fmt: skip
    opened: dict[str, Any] = {"gamma_init": 0.3, "s_init": 0.3, "gaussian_heads": "all"}
    kinds = opened, {"gate": "sigmoid"}, opened | {"content": "linear"}, opened | {"attend_padding": True}
    dtypes = torch.float32, torch.bfloat16
    middle = {"gamma_init": 0.3, "head_dim": 8}
    cases: list[tuple[str, dict[str, Any], torch.dtype]] = [
        ("3x3", {"gate": "bias", "bias_init": 10.0}, dtype) for dtype in dtypes
    ]
    for at, name in enumerate(convolutions):
        for form, backend in enumerate(("auto", "reference", "dense", "split", "merged", "sdpa")):
            cases.append((name, kinds[(at + form) % 4] | {"backend": backend}, dtypes[(at // 4 + form) % 2]))
        for number, config in enumerate(({}, middle, middle | {"project_values": False})):
            cases.append((name, config, dtypes[(at + number) % 2]))
    for name, config, dtype in cases:
        layer = convert(convolutions[name], recast.RecastConfig(**config))
        if config.get("gate") == "bias":
            layer.set_size_(9, 7)
        yield f"{name} {config}", layer, (2, 8, 9, 7), dtype


def networks() -> Iterator[Case]:
    """Networks with open layers, attention pooling, and those of the papers."""
    resnet = timm.create_model("test_resnet.r160_in1k", num_classes=5)
    config = recast.RecastConfig(gamma_init=0.2)
    child = recast.recast_(copy.deepcopy(resnet), recast.plan(resnet, torch.zeros(2, 3, 64, 64), config))
    pooled = recast.attention_pool_(copy.deepcopy(resnet), per_class=True)
    yield "recast resnet", child, (2, 3, 64, 64), torch.float32
    yield "pooled resnet", pooled, (2, 3, 64, 64), torch.float32
    patchconvnet = timm.create_model("patchconvnet_s60", num_classes=5, depth=2)
    yield "PatchConvNet", patchconvnet, (2, 3, 64, 64), torch.float32


def passes(model: nn.Module, shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, Callable[[], None]]:
    """Return a pass for inference and one for training."""

    def inference() -> None:
        with torch.no_grad():
            check(model.eval()(torch.empty(shape, device=CARD, dtype=dtype)))

    def training() -> None:
        optimizer = torch.optim.AdamW(recast.param_groups(model, lr=1e-3), foreach=False)
        images = torch.empty(shape, device=CARD, dtype=dtype, requires_grad=True)
        output = model.train()(images)
        check(output)
        output.float().square().mean().backward()
        check(images.grad, *(p.grad for p in model.parameters() if p.grad is not None))
        optimizer.step()

    return {"inference": inference, "training": training}


def suites(model: nn.Module) -> dict[str, Callable[[], None]]:
    """Return attacks of the evaluation."""
    images, labels = torch.empty(2, 3, 64, 64, device=CARD), torch.zeros(2, dtype=torch.long, device=CARD)
    return {
        "PGD": lambda: check(pgd(model.eval(), images, labels, 4 / 255, steps=2)),
    }


def check(*tensors: Any) -> None:
    """Raise AssertionError for a tensor that is not on the card."""
    for tensor in tensors:
        assert tensor.device.type == CARD, f"on {tensor.device}"


def main() -> int:
    """Run all cases; return how many failed."""
    _setup_privateuseone_for_python_backend(CARD)
    make = torch.tensor  # it fills a real tensor, which this backend does not have: make it on the CPU and move it
    torch.tensor = lambda data, device=None, **other: make(data, **other).to(device)  # type: ignore[assignment]
    ran = failed = 0
    for name, real, shape, dtype in itertools.chain(layers(), networks()):
        copied = copy.deepcopy(real)
        with FakeTensorMode():
            model = on_card(copied, dtype)
            calls = passes(model, shape, dtype)
            if name == "recast resnet":
                calls |= suites(model)
            for kind, call in calls.items():
                ran += 1
                try:
                    call()
                except Exception as error:
                    failed += 1
                    print(f"{name} {dtype} {kind}: {type(error).__name__}: {str(error).splitlines()[0][:200]}")
    print(f"{ran} passes, {failed} failed")
    return failed


if __name__ == "__main__":
    failures = main()
    sys.stdout.flush()
    os._exit(failures > 0)  # autograd's thread for the made-up device does not end
