"""Low-rank adapters: do they fit on a recast network's convolutions, and merge into them?"""

from __future__ import annotations

import copy
from typing import Any

import torch
from tools import Case, Cell, relative, tool
from torch import nn

import recast

PEFT = ("peft==0.21.2", "transformers==5.23.0", "accelerate==1.15.0")


def opened(model: nn.Module) -> nn.Module:
    """Give the adapters, which start at 0, an effect."""
    for name, parameter in model.named_parameters():
        if "lora_B" in name or "lora_up" in name:
            nn.init.normal_(parameter, std=0.02)
    return model.eval()


def by_peft(case: Case, **options: Any) -> Cell:
    """Adapt, merge, and compare the merged network with the adapted one."""
    from peft import LoraConfig, get_peft_model

    modules = [(name, module) for name, module in case.model.layer4.named_modules() if "downsample" not in name]
    names = [f"layer4.{name}" for name, module in modules if isinstance(module, nn.Conv2d | recast.GPSA)]
    adapted = opened(get_peft_model(copy.deepcopy(case.model), LoraConfig(r=4, target_modules=names, **options)))
    with torch.no_grad():
        before = adapted(case.images)
        error = relative(adapted.merge_and_unload()(case.images), before)
    frozen = "attention is frozen like the rest of the network: `modules_to_save` trains it"
    return Cell("exact" if error < 1e-4 else "wrong", error, frozen * (case.layer != "parent"))


NOT_BY_CLASS = {"refused": "adapters take layers by their class; with attention *beside* the convolution they fit"}


@tool("peft, LoRA", "adapt the convolutions of a recast network, then merge", *PEFT, remedy=NOT_BY_CLASS)
def peft_lora(case: Case) -> Cell:
    return by_peft(case)


@tool("peft, DoRA", "adapt the convolutions of a recast network, then merge", *PEFT, remedy=NOT_BY_CLASS)
def peft_dora(case: Case) -> Cell:
    return by_peft(case, use_dora=True)


@tool("peft, then Recast", "recast a network whose convolutions have LoRA", *PEFT, is_own=True)
def peft_first(case: Case) -> Cell:
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(copy.deepcopy(case.parent), LoraConfig(r=4, target_modules=r"layer4.*conv\d")).eval()
    plan = recast.plan(adapted, case.images, recast.RecastConfig(gate=case.layer), where="*layer4.*conv*")
    return Cell("wrong", None, f"{plan.steps[0].name} is recast")


@tool("LyCORIS", "LoRA on every convolution and linear layer, then merge", "lycoris-lora==4.1.3")
def lycoris(case: Case) -> Cell:
    from lycoris import LycorisNetwork, create_lycoris

    LycorisNetwork.apply_preset({"target_module": ["Conv2d", "Linear"]})
    model = copy.deepcopy(case.model)
    adapters = create_lycoris(model, 1.0, linear_dim=4, linear_alpha=4, algo="lora")
    adapters.apply_to()
    opened(adapters)
    with torch.no_grad():
        before = model(case.images)
        adapters.restore()
        adapters.merge_to(1.0)
        error = relative(model(case.images), before)
    return Cell("exact" if error < 1e-4 else "wrong", error, f"{len(adapters.loras)} adapters")
