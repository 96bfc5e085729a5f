from functools import cache
from unittest.mock import patch

import pytest
import timm
import torch
from torch import nn

from recast.lab.recipes import RECIPES, make_recipe
from recast.models.names import split_name
from recast.models.sources import create

# Parameters from the specifications of the networks, 1000 classes.
PARAMETERS = {
    "deit_base_distilled_384": 87_630_032,
    "deit3_huge": 632_126_440,
    "cait_m48_distilled_448": 356_460_520,
    "resmlp_big_24": 129_138_280,
    "resmlp_big_24_p16": 115_736_776,
    "resmlp_12_p14": 15_607_912,
    "resmlp_12_p8": 22_051_624,
    "cait_xs36": 38_557_432,
    "cait_s48": 89_525_224,
    "cait_m24": 185_850_088,
    "patchconvnet_b120_ade20k": 229_834_548 - 5_908_992 - 768 * (1 + 2) - 1000 * 769,  # without pool, token, norm, head
    "tcnn_resnetrs350": 163_956_168,
}


def _undrawn(tensor: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
    return tensor


@cache
def built(name: str, input_size: int | None) -> nn.Module:
    size = {} if input_size is None else {"img_size": input_size}
    # on the meta device most of the time would go into drawing numbers that do not exist
    skip = ("timm.layers.weight_init._trunc_normal_", "torch.nn.init.kaiming_normal_")
    with torch.device("meta"), patch(skip[0], _undrawn), patch(skip[1], _undrawn):
        return create(*split_name(name), size, pretrained=False)


def model_of(recipe_name: str) -> nn.Module:
    config = make_recipe(recipe_name).model
    return built(config.name, config.input_size)


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters(name: str) -> None:
    assert sum(parameter.numel() for parameter in model_of(name).parameters()) == PARAMETERS[name]


def test_a_later_stage_differs_from_the_earlier_one_in_positions_only() -> None:
    for name, before in ((name, entry.after) for name, entry in RECIPES.items() if entry.after):
        network = make_recipe(name).model.name
        if network.endswith("_multi") or ":" in network:
            continue  # its weights are converted first, or become those of its body
        later, earlier = model_of(name).state_dict(), model_of(before).state_dict()
        assert later.keys() == earlier.keys(), name
        assert {key for key in later if later[key].shape != earlier[key].shape} <= {"pos_embed"}, name


def test_a_recipe_asks_for_what_its_network_has() -> None:
    """Images of its size, a distillation token, LayerScale, and weights of timm's for parents and teachers."""
    for name in RECIPES:
        recipe, model = make_recipe(name), model_of(name)
        # networks of one size keep it in their patch embedding; convolutional ones take any
        embedding = getattr(model, "patch_embed", None) or getattr(model, "stem", None)
        size = recipe.data.img_size
        assert getattr(embedding, "img_size", None) in (None, (size, size)), name
        has_token = hasattr(model, "set_distilled_training")
        assert has_token == name.startswith(("deit_tiny_distilled", "deit_small_distilled", "deit_base_distilled"))
        assert not has_token or recipe.teacher.targets.kind == "hard", name
        if (deit := recipe.papers.get("deit")) and deit.layer_scale is not None:
            assert any(key.endswith(("gamma", "gamma_1", ".ls1")) for key in model.state_dict()), name
        if recipe.model.pretrained:
            assert timm.models.is_model_pretrained(recipe.model.name), name
        if recipe.teacher.kind == "model":
            assert recipe.teacher.teacher_pretrained, name
            assert timm.models.is_model_pretrained(recipe.teacher.teacher_model), name
