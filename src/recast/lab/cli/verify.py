"""`recast verify MODEL`: recast it and compare with the parent."""

from __future__ import annotations

import copy
import math
import operator
import sys
from collections.abc import Iterator
from functools import reduce
from typing import TYPE_CHECKING

from recast.config import Count, FilePath, Seed
from recast.errors import RecastError
from recast.lab.cli.command import Command, Compute, Typed, print_json
from recast.lab.cli.plan import Network, example_shape
from recast.lab.config import ImagesConfig
from recast.lab.config.evaluation import parse_size
from recast.layers.config import Backend

if TYPE_CHECKING:
    from torch import Tensor, nn

    from recast.lab.data import Data
    from recast.surgery.exactness import Exactness
    from recast.surgery.plan import Plan

EXAMPLES = """  recast verify resnet50
  recast verify resnext50_32x4d --img-size 224x160 --where 'layer3.*' 'layer4.*'
  recast verify resnet50 --where none --pool per_class        (only attention pooling)
  recast verify cifar_resnet20 --checkpoint weights.safetensors --data cifar100 --data-dir DIR --num-images 1000
"""
AT_ONCE = 16
"""Images per forward pass, which bounds the memory."""


def verify(
    model: str,
    /,
    *,
    data: str | None = None,
    data_dir: FilePath | None = None,
    img_size: str | None = None,
    num_images: Count = 8,
    device: str = "cpu",
    seed: Seed = 0,
    network: Typed[Network],
    output: Compute,
) -> int:
    """Recast a model and compare it with its parent on random images or those of a data set. In a network with random
    weights, scales of zero and one are replaced first, so that every layer affects the outputs. As a control, one layer
    is changed: its attention is added, two of its heads are swapped, or the query of its pooling is moved. If this
    changes nothing, the comparison is inconclusive. Exit code 1: not the same function, or inconclusive.

    Args:
        model: timm:NAME (or NAME), torchvision:NAME, upernet|maskrcnn|fasterrcnn|retinanet:NAME, or
            pkg.module:function.
        data: Data set with real images.
        data_dir: Folder of the data set.
        img_size: Pixels, 224 or 224x160 (height x width). None: the network's own, or 224; of a data set its own.
        num_images: Images to compare on.
        device: auto, cpu, cuda or mps.
        seed: Seed of random weights and images.
    """
    settings = Network.of(network, model)
    if data is None and data_dir is not None:
        raise RecastError("--data-dir requires --data: folder, cifar100, …")

    import torch

    from recast.lab.data.device import choose_device
    from recast.surgery.scales import randomize_scales_

    torch.manual_seed(seed)
    place = choose_device(device)
    dataset = settings.load(_config(data, data_dir, img_size)) if data else None
    with network.named():
        parent = settings.open(dataset)
    images = _images(dataset and dataset.fitted_to(parent)[0], num_images, example_shape(parent, img_size))
    if not settings.has_weights:
        # so that every layer moves the outputs; the statistics of a map of one pixel need two images
        randomize_scales_(parent, torch.cat([images, images.flip(-1)]) if len(images) == 1 else images[:AT_ONCE])
    parent, images = parent.to(place), images.to(place)
    planned = settings.plan_of(parent, images[:1])
    results = _compare(parent, planned, images)
    is_same, telling = all(result.ok() for result in results.values()), [*results.values()][-1].telling
    if output.as_json:
        forms = {form: result.to_dict() for form, result in results.items()}
        controls = [form.pop("control") for form in forms.values()]
        print_json({"same": is_same, "telling": bool(telling), "forms": forms, "control": controls[-1]})
    else:
        _print(planned, images, results, is_same)
    for note in _notes(planned, telling, is_same):
        print(f"note: {note}", file=sys.stderr)
    return 0 if is_same and telling else 1


COMMAND = Command(verify, "MODEL [options]", EXAMPLES)


def _config(name: str, data_dir: str | None, img_size: str | None) -> ImagesConfig:
    side, width = parse_size(img_size, "--img-size") if img_size else (None, None)
    if side != width:
        raise RecastError(f"images of a data set are square: --img-size {side}, got {img_size!r}")
    return ImagesConfig(name, data_dir, img_size=side)


def _compare(parent: nn.Module, planned: Plan, images: Tensor) -> dict[str, Exactness]:
    """Recast a copy of the parent and compare the two in every form of the layers, with a control."""
    from recast.surgery.apply import recast_
    from recast.surgery.verify import verify as exactness

    child = recast_(copy.deepcopy(parent), planned)
    # C-MHSA and attention pooling have one form only
    one_form = planned.config.gate == "bias" or not planned.steps
    forms: tuple[Backend, ...] = ("auto",) if one_form else ("split", "dense")
    parts = images.split(AT_ONCE)
    return {
        form: reduce(operator.add, (exactness(parent, child, part, backend=form, control=True) for part in parts))
        for form in forms
    }


def _images(data: Data | None, number: int, shape: tuple[int, int, int]) -> Tensor:
    """Return images of a data set, or random ones of a shape."""
    import torch

    from recast.lab.data.device import check_memory

    if data is not None:
        number, shape = min(number, len(data.val)), (len(data.mean), data.test_size, data.test_size)
    needed = 4 * 4 * number * math.prod(shape)  # float32, and copies
    check_memory(needed, f"{number:,} images of {shape[1]}×{shape[2]}")
    if data is None:
        return torch.randn(number, *shape)
    return data.normalised(torch.stack([data.val[i][0] for i in range(number)]), torch.device("cpu"))


def _print(plan: Plan, images: Tensor, results: dict[str, Exactness], is_same: bool) -> None:
    height, width = images.shape[-2:]
    pooling = "" if plan.pool is None else f", attention pooling ({plan.pool.kind.replace('_', ' ')})"
    is_after = any(step.is_after_block for step in plan.steps)
    noun = ("new layer" if is_after else "convolution") + "s" * (len(plan.steps) != 1)
    layers = f"{plan.model}: {len(plan.steps)} {noun} {'after blocks' if is_after else 'recast'}{pooling}"
    print(f"{layers}, {len(images)} images of {height}×{width}")
    for result in results.values():
        print(f"  {result}")
    for name, error in result.layers.items():
        print(f"    {name}: relative error {error:.1e} ({result.backend})")
    swapped = "attention of one layer added" if plan.config.gate == "beside" else "two heads of one layer swapped"
    change = swapped if plan.steps else "the query of the pooling moved"
    print(f"  control, {change}: {result.control}")
    by = {"outputs": "", "layers": ", by its layers", "": "; inconclusive: the control changed nothing"}
    print(("same function" if is_same else "NOT the same function") + by[result.telling])


def _notes(plan: Plan, telling: str, is_same: bool) -> Iterator[str]:
    """Yield explanations of the result of a comparison."""
    gate, start = plan.config.gate if plan.steps else "", getattr(plan.pool, "start", "")
    if telling == "layers":
        yield (
            "the control does not change the outputs (a detector with random weights finds no boxes), so only the "
            "layers were compared; use trained weights (--pretrained, --checkpoint) to compare outputs"
        )
    if gate == "sigmoid" and not is_same:
        yield "the sigmoid gate does not start as the parent; beside and linear do"
    if gate == "bias" and not is_same:
        yield "C-MHSA equals the convolution only in the limit; a larger --bias-init reduces the error"
    if start == "paper":
        yield "--start paper changes the outputs and needs training; --start average keeps the parent's mean"
