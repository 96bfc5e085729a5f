import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torchvision
from small import assert_same, changed_names, small_child, small_fit, small_parent
from timm.layers import DropPath
from timm.models.cait import Cait
from timm.models.mlp_mixer import MlpMixer, ResBlock
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from recast.errors import RecastError
from recast.lab.config import Recipe, RegularizationConfig
from recast.lab.training.regularization import drop_path_places, prepare_, set_drop_path_
from recast.models.cifar import CifarResNet
from recast.papers.first_weights import draw_
from recast.papers.patchconvnet.network import PatchConvNet
from recast.surgery.scales import layer_scales

SMALL: dict[str, Any] = {"img_size": 32, "patch_size": 16, "embed_dim": 8, "num_classes": 3}
vit = partial(VisionTransformer, **SMALL, depth=3, num_heads=2, init_values=1e-3)
cait = partial(Cait, **SMALL, depth=3, depth_token_only=2, num_heads=2)
resmlp = partial(MlpMixer, **SMALL, num_blocks=3, mlp_ratio=2, block_layer=ResBlock)


NETWORKS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "resnet": (lambda: timm.create_model("test_resnet"), 4),
    "resnet-d": (lambda: timm.create_model("resnet26d", num_classes=3), 8),
    "regnet": (lambda: timm.create_model("regnetx_002", num_classes=3), 13),
    "convnext": (lambda: timm.create_model("test_convnext"), 9),
    "cifar": (lambda: CifarResNet((2, 2, 2), num_classes=3, shortcut="option_a"), 6),
    "vit": (vit, 3),
    "cait": (cait, 3),
    "resmlp": (resmlp, 3),
    "patchconvnet": (lambda: PatchConvNet(16, 3, num_classes=3), 3),
    "torchvision": (lambda: torchvision.models.efficientnet_b0(num_classes=3), 16),
}


def probabilities(model: nn.Module) -> list[float]:
    """Of every block, as its places say it; 0 for no DropPath."""
    rates = []
    for places in drop_path_places(model):
        modules = [getattr(holder, attribute) for holder, attribute in places]
        (rate,) = {module.drop_prob if isinstance(module, DropPath) else 0.0 for module in modules}
        rates.append(rate)
    return rates


@pytest.fixture(scope="module")
def networks() -> dict[str, nn.Module]:
    torch.manual_seed(0)
    return {name: make() for name, (make, _) in NETWORKS.items()}


@pytest.mark.parametrize("name", NETWORKS)
def test_every_block_gets_its_probability(networks: dict[str, nn.Module], name: str) -> None:
    model, blocks = networks[name], NETWORKS[name][1]
    names = list(model.state_dict())
    set_drop_path_(model, 0.3, "linear")
    assert probabilities(model) == pytest.approx([0.3 * i / (blocks - 1) for i in range(blocks)])
    for block in getattr(model, "blocks_token_only", ()):
        assert not any(isinstance(module, DropPath) for module in block.modules()), "class attention has none"
    set_drop_path_(model, 0.2, "uniform")
    assert probabilities(model) == [0.2] * blocks
    assert any(isinstance(module, DropPath) for module in model.modules())
    set_drop_path_(model, 0.0)
    assert probabilities(model) == [0.0] * blocks
    assert not any(isinstance(module, DropPath) for module in model.modules())
    assert list(model.state_dict()) == names


@pytest.mark.parametrize(
    ("name", "count"), [("vit", 6), ("cait", 10), ("resmlp", 6), ("convnext", 9), ("patchconvnet", 5)]
)
def test_every_layer_scale_gets_its_value(networks: dict[str, nn.Module], name: str, count: int) -> None:
    model = networks[name]
    before = copy.deepcopy(model.state_dict())
    prepare_(model, Recipe(papers={"deit": {"layer_scale": 0.123}}))
    changed = changed_names(before, model)
    assert changed == set(layer_scales(model))
    assert len(changed) == count
    assert all(bool((model.state_dict()[key] == 0.123).all()) for key in changed)


@pytest.mark.parametrize("name", ["deit3_small_patch16_224", "deit_tiny_distilled_patch16_224", "resmlp_12_224"])
def test_first_weights_are_those_of_deit_s_code(name: str) -> None:
    """timm's are not: a class token of 1e-6, a head of 0, Xavier's rule."""
    model = draw_(timm.create_model(name), 0.02)
    drawn = {key: p.detach() for key, p in model.named_parameters() if key.endswith("_token") or p.ndim == 2}
    assert len(drawn) > 30
    assert all(0.018 < float(p.std()) < 0.022 and p.abs().max() <= 2 for p in drawn.values())
    stem = next(module for module in model.modules() if isinstance(module, nn.Conv2d))
    assert stem.weight.abs().max() <= stem.weight[0].numel() ** -0.5  # torch's own: uniform
    biases = [module.bias for module in model.modules() if isinstance(module, nn.Linear)]
    assert not any(bias is not None and bias.any() for bias in biases)


def test_what_a_network_has_not_is_refused() -> None:
    with torch.device("meta"):
        models = timm.create_model("vgg11"), timm.create_model("vovnet57a"), torchvision.models.resnet18()
        plain = CifarResNet((1, 1, 1), num_classes=3, shortcut="option_a")
    for model in models:
        with pytest.raises(RecastError, match="no residual block with a place for stochastic depth"):
            set_drop_path_(model, 0.1)
        assert set_drop_path_(model, 0.0) is model  # nothing to remove
    for rate in (1.0, -0.1):
        with pytest.raises(RecastError, match=f"got {rate}"):
            set_drop_path_(plain, rate)
    with pytest.raises(RecastError, match="no LayerScale"):
        prepare_(plain, Recipe(papers={"deit": {"layer_scale": 1e-4}}))


@pytest.mark.parametrize(
    ("freeze", "make", "where", "trained"),
    [
        ("all_but_batch_norm", small_parent, ["none"], {"1.", "5.", "9."}),
        ("all_but_attention", small_child, ["4"], {"4.", "9."}),
    ],
)
def test_only_what_is_left_out_of_the_frozen_changes(
    freeze: Any, make: Callable[[], nn.Module], where: list[str], trained: set[str], tmp_path: Path
) -> None:
    """BatchNorms are 1 and 5, the recast layer 4, the classifier 9."""
    model = make()
    before = copy.deepcopy(model.state_dict())
    rows = small_fit(tmp_path, model, regularization=RegularizationConfig(freeze=freeze), where=where)
    changed = changed_names(before, model)
    assert {next((start for start in trained if name.startswith(start)), name) for name in changed} == trained
    assert freeze == "all_but_attention" or {"1.running_mean", "5.running_var"} <= changed
    assert rows[-1]["train_loss"] < rows[1]["train_loss"]


def test_prepare_does_what_the_recipe_says_and_leaves_alone_what_it_leaves_open() -> None:
    model = timm.create_model("test_convnext", num_classes=3, drop_path_rate=0.1)
    state, before = copy.deepcopy(model.state_dict()), probabilities(model)
    prepare_(model, Recipe())
    assert probabilities(model) == before
    assert_same(state, model)
    deit = {"drop_path_mode": "uniform", "layer_scale": 0.25}
    regularization = RegularizationConfig(drop_path=0.2)
    prepare_(model, Recipe(regularization=regularization, papers={"deit": deit}, channels_last=True))
    assert probabilities(model) == [0.2] * 9
    assert all(bool((scale == 0.25).all()) for scale in layer_scales(model).values())
    assert model.stem[0].weight.is_contiguous(memory_format=torch.channels_last)


CHECKPOINTED: dict[str, Callable[[], nn.Module]] = {
    "BatchNorm": lambda: timm.create_model("test_resnet", num_classes=3, drop_path_rate=0.3),
    "dropout": lambda: vit(img_size=8, patch_size=4, proj_drop_rate=0.2, drop_path_rate=0.3),
    "ours": lambda: PatchConvNet(8, 2, num_classes=3),
}


@pytest.mark.parametrize("name", CHECKPOINTED)
def test_checkpointed_blocks_are_computed_again_and_change_nothing(name: str, tmp_path: Path) -> None:
    """Bit for bit the losses, weights and BatchNorm statistics of a training that stores all activations."""
    losses: dict[bool, list[float]] = {False: [], True: []}
    calls = {False: 0, True: 0}
    for switched in losses:
        torch.manual_seed(0)
        model = CHECKPOINTED[name]()
        block = model.get_submodule({"BatchNorm": "layer1.0"}.get(name, "blocks.0"))

        def count(module: nn.Module, _inputs: Any, switched: bool = switched) -> None:
            calls[switched] += module.training

        block.register_forward_pre_hook(count)
        folder = tmp_path / str(switched)
        small_fit(folder, model, losses=losses[switched], epochs=2, accumulate=2, grad_checkpointing=switched)
    assert calls == {False: 20, True: 40}
    assert losses[True] == losses[False]
    assert_same(tmp_path / "True", tmp_path / "False")


@pytest.mark.parametrize("make", [small_parent, lambda: timm.create_model("pit_ti_224")])
def test_a_network_without_checkpointing_is_refused(make: Callable[[], nn.Module]) -> None:
    with pytest.raises(RecastError, match="has no gradient checkpointing: drop grad_checkpointing"):
        prepare_(make(), Recipe(grad_checkpointing=True))
