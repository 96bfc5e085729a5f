"""`recast verify MODEL`: recast it and compare with the parent."""

from __future__ import annotations

import copy
import math
import operator
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING

from recast.config import Count, Seed
from recast.lab.cli.help import Command
from recast.lab.cli.options import ModelOptions, parse, print_json
from recast.lab.cli.plan import example_shape, load_named, make_plan, open_parent
from recast.layers.config import Backend
from recast.surgery.limits import Budget

if TYPE_CHECKING:
    from recast.surgery.exactness import Exactness

EXAMPLES = """  recast verify resnet50
  recast verify resnext50_32x4d --img-size 224x160 --where 'layer3.*' 'layer4.*'
  recast verify resnet50 --where none --pool per_class        (attention pooling alone)
  recast verify cifar_resnet20 --checkpoint weights.safetensors --data cifar100 --data-dir DIR --num-images 1000
"""
ABOUT = """Recast a model and compare it with its parent on images: random ones, or those of a data set.
Random weights are made telling first (no zero or unit scales). A control swaps two heads of one layer, or
moves the query of attention pooling: it must show, or the comparison proves nothing. Exit code 1: not the
same function, or nothing proved."""


AT_ONCE = 16
"""Images that a network is given at a time: however many are asked for, the memory of what it computes is bounded."""


@dataclass
class VerifyOptions(ModelOptions):
    """What `recast verify` is asked for."""

    data: str | None = None
    """a data set's name, for real images"""
    data_dir: str | None = None
    """where it lies"""
    num_images: Count = 8
    """images to compare on"""
    device: str = "cpu"
    """auto, cpu, cuda or mps"""
    seed: Seed = 0
    """seed of random weights and images"""


def run(argv: Sequence[str]) -> int:
    """Print how far the recast model is from its parent in each form of the layer; 1 if it is another function."""
    options = parse(Command("verify", "MODEL [options]", ABOUT, EXAMPLES), VerifyOptions(), argv)
    Budget.parse(options.budget)

    import torch

    from recast.lab.device import check_memory, choose_device
    from recast.surgery.apply import recast_
    from recast.surgery.exactness import TOLERANCE
    from recast.surgery.scales import randomize_scales_
    from recast.surgery.verify import shifted_queries, swapped_heads, verify

    torch.manual_seed(options.seed)
    device = choose_device(options.device)
    model, data = open_parent(options, load_named(options.data, options.data_dir, options.img_size))
    if data is not None:
        shape = min(options.num_images, len(data.val)), 3, data.test_size, data.test_size
    else:
        shape = options.num_images, *example_shape(model, options.img_size)
    check_memory(4 * 4 * math.prod(shape), f"{shape[0]:,} images of {shape[2]}×{shape[3]}")  # float32, and copies
    if data is not None:
        batch = data.normalised(torch.stack([data.val[i][0] for i in range(shape[0])]), torch.device("cpu"))
    else:
        batch = torch.randn(shape)
    if not (options.pretrained or options.checkpoint):
        # the statistics of a map of one pixel need two images
        randomize_scales_(model, torch.cat([batch, batch.flip(-1)]) if len(batch) == 1 else batch[:AT_ONCE])
    model, batch = model.to(device), batch.to(device)
    planned = make_plan(model, batch[:1], options)
    child = recast_(copy.deepcopy(model), planned)
    # C-MHSA and attention pooling have one form only
    one_form = planned.config.gate == "bias" or not planned.steps
    forms: tuple[Backend, ...] = ("auto",) if one_form else ("split", "dense")

    def compared(form: Backend | None = None) -> Exactness:
        return reduce(operator.add, (verify(model, child, part, backend=form) for part in batch.split(AT_ONCE)))

    results = {form: compared(form) for form in forms}
    with swapped_heads(child) if planned.steps else shifted_queries(child):
        control = compared()
    shown = control.max_relative_error > 100 * TOLERANCE
    telling = shown or max(control.layers.values(), default=0.0) > 100 * TOLERANCE
    same = all(result.ok() for result in results.values())
    if options.json:
        print_json(
            {"same": same, "telling": telling, "forms": {form: r.to_dict() for form, r in results.items()}}
            | {"control": control.to_dict()}
        )
    else:
        height, width = batch.shape[-2:]
        pooling = "" if planned.pool is None else f", attention pooling ({planned.pool.kind.replace('_', ' ')})"
        recast = f"{planned.model}: {len(planned.steps)} convolutions recast{pooling}"
        print(f"{recast}, {len(batch)} images of {height}×{width}")
        for result in results.values():
            print(f"  {result}")
        last = results[forms[-1]]
        for name, error in last.layers.items():
            print(f"    {name}: relative error {error:.1e} ({last.backend})")
        what = "two heads of one layer swapped" if planned.steps else "the query of the pooling moved"
        print(f"  control, {what}: {control}")
        by = "" if shown else ", by its layers" if telling else "; the control did not show, so this proves nothing"
        print(("same function" if same else "NOT the same function") + by)
    pool, gate = planned.pool, planned.config.gate if planned.steps else ""
    for note, applies in (
        (
            "the outputs do not show even the control (a detector with random weights finds no boxes): only the layers "
            "were compared; trained weights (--pretrained, --checkpoint) let the outputs tell",
            telling and not shown,
        ),
        ("the sigmoid gate's start is not the parent (see calibrate_)", gate == "sigmoid" and not same),
        ("C-MHSA is the convolution in the limit: a larger --bias-init leaks less", gate == "bias" and not same),
        (
            f"{planned.model} does not end in the mean over its last map, and the pool starts as that mean",
            pool is not None and pool.start == "average" and not (gate or same),
        ),
        (
            "pool.start=paper is a function of its own, for training: average starts as the parent's mean",
            pool is not None and pool.start == "paper",
        ),
    ):
        if applies:
            print(f"note: {note}", file=sys.stderr)
    return 0 if same and telling else 1
