"""The library with arguments that it must refuse: one sentence, and no model, optimiser, plan or random state moved."""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import timm
import torch
from hypothesis import strategies as st
from judging import CHANGED, Case
from mutations import NUMBERS, SHAPES, TEXTS, drawn
from torch import nn

import recast
from recast.errors import RecastError, one_line

STRANGE = (
    "None", "True", "0", "-1", "2.5", "float('nan')", "float('inf')", "10**30", "'x'", "''", "'canary:net'", "[]",
    "{}", "()", "[None]", "object()", "lambda *a: 1 / 0",
    "torch.zeros(0)", "torch.zeros(1, 3, 16)", "torch.zeros(0, 3, 16, 16)", "torch.zeros(1, 5, 16, 16)",
    "torch.full((1, 3, 16, 16), float('nan'))",
    "torch.zeros(1, 3, 16, 16, dtype=torch.long)", "torch.zeros(1, 3, 16, 16).double()", "torch.zeros(1, 3, 1, 1)",
    "torch.zeros(1, 3, 16, 16, device='meta')",
    "[torch.zeros(1, 3, 16, 16), None]", "iter([])", "(1 / 0 for _ in [1])", "net", "nn.Identity()", "nn.Conv2d",
    "b'x'", "Path('.')", "Path('/dev/zero')",
    "model", "child", "p", "x", "recast.RecastConfig(gate='bias')", "recast.PoolConfig(kind='single')",
    "float('inf') * -1", "range(3)", "[torch.full((2, 3, 16, 16), float('inf'))]",
)  # fmt: skip
CALLS = (
    "recast.plan({}, x)", "recast.plan(model, {})", "recast.plan(model, x, {})", "recast.plan(model, x, where={})",
    "recast.plan(model, x, budget={})", "recast.plan(model, x, pool={})",
    "recast.recast_(model, {})", "recast.recast_({}, p)", "recast.recast_(model, p, steps={})",
    "recast.recast_(child, {})",
    "recast.verify(model, {}, x)", "recast.verify({}, child, x)", "recast.verify(model, child, {})",
    "recast.verify(model, child, x, backend={})", "recast.trace(model, {}, x)", "recast.trace(model, p, {})",
    "recast.fold_(child, {})", "recast.fold_(child, 0.01, data={})", "recast.fold_(child, kernel={})",
    "recast.fold_({})", "recast.fold_(child, batch_norm={})",
    "recast.attention_pool_({})", "recast.attention_pool_(model, config={})",
    "recast.attention_pool_(model, example={})", "recast.attention_pool_(model, {})",
    "recast.calibrate_(soft, model, {})", "recast.calibrate_(soft, {}, [x])", "recast.calibrate_({}, model, [x])",
    "recast.calibrate_(soft, model, [x], {})",
    "recast.wake_(child, {})", "recast.wake_({}, x)", "recast.wake_(child, x, {})", "recast.wake_(child, x, 1.5, {})",
    "recast.wake_(child, x, layers={})",
    "recast.param_groups({})", "recast.param_groups(child, lr={})", "recast.param_groups(child, gate_lr={})",
    "recast.param_groups(child, weight_decay={})", "recast.param_groups(child, layer_decay={})",
    "recast.param_groups(child, plan={})", "recast.recast_during_training_(model, optimizer, {})",
    "recast.recast_during_training_(model, {}, p)", "recast.recast_during_training_({}, optimizer, p)",
    "recast.recast_during_training_(model, optimizer, p, {})",
    "recast.recast_during_training_(model, optimizer, p, gate_lr={})",
    "recast.load({})", "recast.load('child.safetensors', {})", "recast.save(child, {})",
    "recast.save({}, 'new.safetensors')", "recast.save(child, 'new.safetensors', {})",
    "recast.record({}).__enter__()", "recast.refresh_gates_({})", "recast.lab.evaluation.evaluate({}, 'clean', None)",
    "recast.lab.evaluation.evaluate(model, {}, None)", "recast.lab.evaluation.evaluate(model, 'clean', {})",
    "recast.RecastConfig(head_dim={})", "recast.RecastConfig(alpha={})", "recast.RecastConfig(gamma_init={})",
    "recast.RecastConfig(gate={})", "recast.RecastConfig(gate_range={})",
    "recast.RecastConfig(attend_padding={})", "recast.RecastConfig(backend={})",
    "recast.PoolConfig(kind='single', num_heads={})", "recast.PoolConfig(kind={})",
    "recast.PoolConfig(kind='single', init_values={})",
    "recast.Geometry({})", "recast.Geometry((3, 3), {})", "recast.Geometry((3, 3), padding={})",
    "recast.Geometry((3, 3), dilation={})", "recast.Geometry((3, 3), padding_mode={})",
    "recast.GPSA({}, 4, recast.Geometry((3, 3)))", "recast.GPSA(3, 4, {})",
    "recast.GPSA(3, 4, recast.Geometry((3, 3)), groups={})", "recast.GPSA(3, 4, recast.Geometry((3, 3)), config={})",
)  # fmt: skip
MUST = (
    # what no value could make right: name, call
    "m = nn.Sequential(nn.Conv2d(3, 4, 3)); keep(m); recast.recast_(m, p)",
    "recast.recast_(child, p)", "recast.recast_(model, p, steps=['layer9'])",
    "recast.recast_(model, p, steps='layer3.1.conv1')", "recast.recast_(model, p, steps=['layer3.1.conv1'] * 2)",
    "model.layer3[1].conv2 = nn.Identity(); keep(model); recast.recast_(model, p)",
    "model.layer3[1].conv2.weight.data[0] = float('nan'); keep(model); recast.recast_(model, p)",
    "del model.layer3[1].conv2; keep(model); recast.recast_(model, p)",
    "recast.recast_(model, dataclasses.replace(p, model='Other', steps=()))",
    "e = json.loads(p.to_json()); e['steps'][0]['fold'] = {'kernel': [9, 9]}; recast.recast_(model, replanned(e))",
    "e = json.loads(p.to_json()); e['steps'][-1]['name'] = 'layer3.9.conv1'; recast.recast_(model, replanned(e))",
    "e = json.loads(p.to_json()); e['edits'] = [{'name': 'x', 'stride': [1, 1]}]; recast.recast_(model, replanned(e))",
    "e = json.loads(p.to_json()); e['steps'] = e['steps'] * 2; recast.recast_(model, replanned(e))",
    "recast.fold_(child, -1.0)", "recast.fold_(child, float('nan'))",
    "recast.fold_(child, 0.1, data=torch.zeros(0, 3, 16, 16))", "recast.fold_(child, 0.1, data=[])",
    "recast.fold_(child, 0.1, data=torch.full((2, 3, 16, 16), float('nan')))",
    "recast.fold_(child, 0.1, data=torch.zeros(2, 5, 16, 16))", "recast.fold_(child, kernel=2)",
    "recast.fold_(child, kernel=0)", "recast.fold_(child, kernel=-3)",
    "m = nn.Sequential(nn.Conv2d(3, 4, 3)); recast.attention_pool_(m)",
    "m = recast.attention_pool_(copy.deepcopy(model)); keep(m); recast.attention_pool_(m)",
    "m = nn.Sequential(nn.Flatten(), nn.Linear(768, 3)); keep(m); recast.attention_pool_(m)",
    "recast.attention_pool_(model, config=recast.PoolConfig(kind='single', num_heads=7))",
    "recast.attention_pool_(model, config=recast.PoolConfig())",
    "recast.attention_pool_(model, example=torch.zeros(1, 5, 16, 16))",
    "recast.calibrate_(model, model, [x])", "recast.calibrate_(soft, model, [])",
    "recast.calibrate_(soft, model, [x * float('nan')])", "recast.calibrate_(soft, soft, [x])",
    "recast.calibrate_(soft, model, [x], ridge=-1.0)",
    "recast.calibrate_(soft, model, [x], ridge=float('nan'))",
    "other = timm.create_model('digits_resnet', num_classes=3); recast.calibrate_(soft, other, [x])",
    "recast.calibrate_(soft, nn.Identity(), [x])", "recast.wake_(model, x)", "recast.wake_(child, [])",
    "recast.wake_(child, x * float('nan'))", "recast.wake_(child, x, -1.0)", "recast.wake_(child, x, float('nan'))",
    "recast.wake_(child, x, layers=['layer9'])",
    "recast.wake_(child, torch.zeros(1, 5, 16, 16))", "recast.param_groups(child, lr=float('nan'))",
    "recast.param_groups(child, lr=-1.0)", "recast.param_groups(child, layer_decay=0.0)",
    "recast.param_groups(child, weight_decay=float('inf'))",
    "recast.verify(model, model, x)", "recast.verify(model, child, torch.zeros(0, 3, 16, 16))",
    "other = timm.create_model('digits_resnet', num_classes=3); recast.verify(other, child, x)",
    "recast.verify(nn.Identity(), child, x)", "recast.verify(model, child, torch.zeros(1, 5, 16, 16))",
    "recast.plan(model, torch.zeros(0, 3, 16, 16))", "recast.plan(model, x, where='re:(')",
    "recast.plan(model, x, where='re:(.*)*(.*)*x!')", "recast.plan(model, x, where=['layer9'])",
    "recast.plan(model, x, where=[])", "recast.plan(child, x)",
    "recast.plan(model, x, budget='macs=nan')", "recast.plan(model, x, budget=-5)",
    "recast.plan(model, x, where=lambda n, m: 1 / 0)", "recast.plan('resnet18', x)", "recast.plan(model, 'cat.jpg')",
    "recast.plan(nn.Conv2d(3, 3, 1), x)", "recast.plan(model, x.numpy())",
    "recast.load('notes.txt')", "recast.load('nowhere.safetensors')", "recast.load('weights.safetensors')",
    "recast.load('weights.safetensors', model)", "recast.load('child.safetensors', nn.Identity())",
    "recast.load('child.safetensors', child)", "recast.load('images')",
    "m = net(); keep(m); recast.load('notes.safetensors', m)",
    "recast.save(child, 'new.pth')", "recast.save(child, 'new.safetensors', 'nowhere_net')",
    "recast.save(child, 'notes.txt')", "m = net().to('meta'); recast.save(m, 'new.safetensors')",
    "m = nn.Sequential(nn.LazyConv2d(4, 3)); recast.plan(m, x)",
    "recast.recast_during_training_(model, torch.optim.SGD(child.parameters(), lr=0.1), p)",
    "recast.recast_during_training_(model, optimizer, p, ['layer9'])",
    "recast.recast_during_training_(child, optimizer, p)",
    "torch.fx.symbolic_trace(child)(x)", "model_layer(x.double())",
    "model_layer(torch.zeros(1, 5, 16, 16))", "model_layer(torch.zeros(3, 16))",
)  # fmt: skip


def library_cases(scale: int, number: int, world: Path) -> Iterator[Case]:
    """All of this module: calls that must be refused, and 3 × `scale` with values that may be."""
    chance = random.Random(number + 60)
    for call in MUST if scale > len(MUST) else chance.sample(MUST, scale):
        yield Case("library, wrong calls", call, partial(_call, snippet=call), refused=True)
    values = st.one_of(
        st.sampled_from(STRANGE),
        st.sampled_from(STRANGE),
        st.sampled_from(NUMBERS).map(_literal),
        st.sampled_from(TEXTS).map(repr),
        st.sampled_from(SHAPES).map(_literal),
    )
    for i, value in enumerate(drawn(values, 3 * scale, number + 61)):
        call = chance.choice(CALLS).replace("{}", value)
        yield Case(
            "library, strange values",
            f"{i}: {call[:150]}",
            partial(_call, snippet=call),
            codes=(0, 2),
            may_change=("new.safetensors",),
        )


def _literal(value: Any) -> str:
    text = repr(value)
    return f"float({text!r})" if isinstance(value, float) else text


def _call(folder: Path, snippet: str) -> int:
    """In the child: the exit code a command would give, and what changed although it was refused."""
    import dataclasses
    import json

    torch.manual_seed(0)
    model = timm.create_model("digits_resnet", num_classes=10)
    x = torch.randn(2, 3, 16, 16)
    p = recast.plan(model, x)
    child = recast.recast_(copy.deepcopy(model), p)
    soft = recast.recast_(copy.deepcopy(model), recast.plan(model, x, recast.RecastConfig(gate="sigmoid")))
    optimizer = torch.optim.AdamW(recast.param_groups(model))
    model.layer1.eval()  # a mode of its own must come back
    kept: list[nn.Module] = [model, child, soft]
    known = {
        "recast": recast, "torch": torch, "nn": nn, "timm": timm, "copy": copy, "json": json,
        "dataclasses": dataclasses, "Path": Path, "model": model, "child": child,
        "soft": soft, "p": p, "x": x, "optimizer": optimizer, "net": lambda: timm.create_model("digits_resnet"),
        "model_layer": child.layer3[0].conv1,
    }  # fmt: skip
    before: dict[str, Any] = {}

    def look() -> dict[str, Any]:
        return {
            **{f"model {i}": fingerprint(one) for i, one in enumerate(kept)},
            "random state": torch.get_rng_state().sum().item(), "Python's random state": random.getstate(),
            "gradients": torch.is_grad_enabled(), "dtype": torch.get_default_dtype(),
            "optimizer": [[id(p) for p in group["params"]] for group in optimizer.param_groups],
            "plan": p.to_json(), "x": x.sum().item(), "TF32": torch.backends.cuda.matmul.fp32_precision,
            "threads": torch.get_num_threads(),
        }  # fmt: skip

    def keep(one: nn.Module) -> None:
        """The model that the call is about, as it is before the call."""
        if all(one is not other for other in kept):
            kept.append(one)
        before.update(look())

    known |= {"keep": keep, "replanned": lambda found: recast.Plan.from_json(json.dumps(found))}
    before.update(look())
    *setting, last = snippet.split("; ")
    for line in setting:
        exec(line, known)
    before.update(look())
    try:
        exec(last, known)
    except RecastError as error:
        print(f"recast library: error: {one_line(error)}", file=sys.stderr)
    except Exception as error:
        name = type(error).__name__
        if name == "ZeroDivisionError":  # the user's own function raised it
            print("recast library: error: the user's own", file=sys.stderr)
        else:
            import traceback

            traceback.print_exc()
            return 1
    else:
        return 0
    now = look()
    for what, value in before.items():
        if now[what] != value:
            print(CHANGED + what)
    return 2


def fingerprint(model: nn.Module) -> tuple[Any, ...]:
    """What a refusal must leave of a model: its modules and their modes, weights, buffers, hooks, settings."""
    return (
        [(name, type(module).__name__, id(module), module.training, len(module._forward_hooks),
        len(module._forward_pre_hooks), getattr(module, "backend", None)) for name, module in model.named_modules()],
        [(name, id(p), p.requires_grad, p.dtype, _digest(p), p.grad is None) for name, p in model.named_parameters()],
        [(name, id(b), _digest(b)) for name, b in model.named_buffers()],
    )  # fmt: skip


def _digest(tensor: torch.Tensor) -> bytes:
    return (
        tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()
        if tensor.numel() and tensor.dim()
        else str(tensor.detach()).encode()
    )
