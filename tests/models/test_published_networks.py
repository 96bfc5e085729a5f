"""Networks of the papers: parameters, and what sets each apart from a published one."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import timm
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from timm.models.vision_transformer import VisionTransformer
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from torchvision.transforms.v2.functional import normalize

from recast.errors import RecastError
from recast.lab.config import DataConfig
from recast.lab.data import Loader, load_data
from recast.lab.data.images import in_unit
from recast.models.build import build, input_defaults
from recast.models.cifar import CifarResNet, SubsampleShortcut
from recast.models.config import ModelConfig
from recast.papers.deit.variants import MIXERS, VARIANTS, ClassAttentionViT, ResMLP
from recast.papers.dense.neck import Neck
from recast.papers.dense.segment.networks import UperHead, fcn_head
from recast.papers.grafit.config import Neighbors
from recast.papers.grafit.head import add_embedding_
from recast.papers.patchconvnet.network import PatchConvNet
from recast.papers.prs.network import CMHSAViT
from recast.papers.prs.pixel_conv import PixelConv2d

S60 = 25_231_096
PARAMETERS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    # 0.27M and 0.85M: table 6 of the paper. 1×1 shortcuts with norms add 16·32 + 64 + 32·64 + 128.
    "ResNet-20, option A": (lambda: CifarResNet((3,) * 3, shortcut="option_a"), 269_722),
    "ResNet-20": (lambda: CifarResNet((3,) * 3, shortcut="conv"), 272_474),
    "ResNet-56, option A": (lambda: CifarResNet((9,) * 3, shortcut="option_a"), 853_018),
    "ResNet-56": (lambda: CifarResNet((9,) * 3, shortcut="conv"), 855_770),
    # the pooling has 1,479,936 parameters and a token of 384, the stem 872,208; the sheet's closed forms
    "S60 with an average": (lambda: timm.create_model("patchconvnet_s60_average"), S60 - 1_479_936 - 384),
    "S60 with a linear stem": (
        lambda: timm.create_model("patchconvnet_s60_linear_stem"),
        S60 - 872_208 + 384 * (3 * 16 * 16 + 1),
    ),
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_are_those_of_the_papers(name: str) -> None:
    make, parameters = PARAMETERS[name]
    with torch.device("meta"):
        assert sum(p.numel() for p in make().parameters()) == parameters


# as the ResMLP paper's table of ablations prints them
@pytest.mark.parametrize(("kind", "millions"), [("class", 17.7), ("mlp", 18.6), ("conv", 30.8), ("separable", 16.7)])
def test_millions_of_parameters_of_resmlp(kind: str, millions: float) -> None:
    with torch.device("meta"):
        model = timm.create_model(f"resmlp_12_{kind}")
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, abs=0.05)
    assert f"resmlp_12_{kind}" in VARIANTS


def test_subsample_shortcut_is_option_a() -> None:
    x = torch.randn(2, 16, 9, 7)
    y = SubsampleShortcut(stride=2, pad_channels=8)(x)
    assert torch.equal(y, F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 8, 8)))


@pytest.mark.parametrize(
    ("name", "classes", "red"), [("cifar_resnet20.cifar10", 10, 0.4914), ("cifar_resnet20", 100, 0.5071)]
)
def test_normalisation_differs_by_tag(name: str, classes: int, red: float) -> None:
    model = timm.create_model(name)
    size, _, mean, _ = input_defaults(model)
    assert (model.num_classes, size, mean[0]) == (classes, (32, 32), red)


@pytest.mark.slow
@pytest.mark.skipif(not os.environ.get("RECAST_DATA"), reason="needs trained weights in RECAST_DATA")
@pytest.mark.parametrize(
    ("name", "data", "weights", "top1"),
    [
        ("cifar_resnet20_a", "cifar10", "cifar10_resnet20_akamaster", 91.92),
        ("cifar_resnet20", "cifar100", "cifar100_resnet20_chenyaofo", 68.90),
        ("cifar_resnet56_a", "cifar10", "cifar10_resnet56_akamaster", 93.40),
        ("cifar_resnet56", "cifar100", "cifar100_resnet56_chenyaofo", 72.58),
    ],
)
def test_published_weights_reach_their_accuracy(name: str, data: str, weights: str, top1: float) -> None:
    checkpoint = Path(os.environ["RECAST_DATA"]) / "weights" / f"{weights}.safetensors"
    model = build(ModelConfig(name, checkpoint=str(checkpoint))).eval()
    defaults = input_defaults(model)
    correct, val = 0, load_data(DataConfig(data, num_train=10)).val
    assert len(val) == 5000
    with torch.inference_mode():
        for images, labels in Loader(val, 250):
            logits = model(normalize(in_unit(images), list(defaults.mean), list(defaults.std)))
            correct += int((logits.argmax(1) == labels).sum())
    assert correct / 50 == pytest.approx(top1, abs=0.005)


def small_resmlp(**options: object) -> ResMLP:
    torch.manual_seed(0)
    sizes = {"img_size": 32, "patch_size": 8, "num_blocks": 2, "embed_dim": 8, "num_classes": 3}
    return ResMLP(**sizes, **options).eval()


@pytest.mark.parametrize("mixer", ["linear", *MIXERS])
def test_a_mixer_carries_what_it_should_to_other_patches(mixer: str) -> None:
    """16 patches of 8 pixels; one block: none carries nothing, a convolution to the 8 around, others to all."""
    model = small_resmlp(mixer=mixer)
    model.blocks = model.blocks[:1]
    x = torch.zeros(2, 3, 32, 32)
    x[1, :, 8:16, 8:16] = 1.0  # the patch in the second row and column
    with torch.no_grad():
        changed = model.forward_features(x).diff(dim=0).abs().amax((0, 2)) > 1e-7
    assert int(changed.sum()) == {"none": 1, "linear": 16, "mlp": 16}.get(mixer, 9)


def test_class_layers_read_the_patches_and_leave_them() -> None:
    model, x = small_resmlp(class_layers=2), torch.randn(2, 3, 32, 32)
    torch.nn.init.normal_(model.head.weight)  # timm's starts at zero
    tokens = model.forward_features(x)
    before = tokens.clone()
    logits = model.forward_head(tokens)
    assert torch.equal(tokens, before)
    assert logits.shape == (2, 3)
    assert not torch.allclose(logits[0], logits[1])
    assert not torch.allclose(logits, model.forward_head(tokens.flip(1))), "weights are by position"
    assert torch.equal(model.head(model.forward_head(tokens, pre_logits=True)), logits)


# CaiT's table of class tokens in DeiT-S: SA + CA blocks, the block before which the token enters, parameters, FLOPs
@pytest.mark.parametrize(
    ("depth", "class_layers", "token_at", "millions", "billions"),
    [
        *[(12, 0, 2, 22, 4.6), (12, 0, 11, 22, 4.6), (9, 3, None, 22, 3.6), (10, 2, None, 22, 3.9)],
        *[(11, 1, None, 22, 4.3), (12, 1, None, 24, 4.6), (12, 2, None, 26, 4.7), (12, 3, None, 27, 4.8)],
    ],
)
def test_late_class_tokens_of_deit(
    depth: int, class_layers: int, token_at: int | None, millions: int, billions: float
) -> None:
    settings = {"depth": depth, "class_layers": class_layers, "token_at": token_at}
    with torch.device("meta"), FlopCounterMode(display=False) as flops:
        model = timm.create_model("deit_small_class_attention", **settings)
        model(torch.zeros(1, 3, 224, 224))
    assert round(sum(p.numel() for p in model.parameters()) / 1e6) == millions
    assert round(flops.get_total_flops() / 2e9, 1) == billions


def small_vit(**options: object) -> ClassAttentionViT:
    torch.manual_seed(0)
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 8, "num_heads": 2, "num_classes": 3, "depth": 2}
    return ClassAttentionViT(**sizes, **options).eval()


def test_a_token_from_the_start_is_timm_s_vit() -> None:
    model = small_vit(class_layers=0, token_at=0)
    shape = {"img_size": 32, "patch_size": 8, "embed_dim": 8, "num_heads": 2, "num_classes": 3, "depth": 2}
    plain = VisionTransformer(**shape, no_embed_class=True).eval()
    plain.load_state_dict(model.state_dict())
    x = torch.randn(2, 3, 32, 32)
    assert torch.equal(model(x), plain(x))


@pytest.mark.parametrize("init_values", [None, 0.5])
def test_class_attention_reads_the_patches_and_leaves_them(init_values: float | None) -> None:
    model, x = small_vit(class_layers=2, init_values=init_values), torch.randn(2, 3, 32, 32)
    without = small_vit(class_layers=1, init_values=init_values)
    without.class_layers = nn.ModuleList()
    without.load_state_dict({k: v for k, v in model.state_dict().items() if not k.startswith("class_layers")})
    tokens, before = model.forward_features(x), without.forward_features(x)
    assert torch.equal(tokens[:, 1:], before[:, 1:])
    assert torch.allclose(before[0, 0], before[1, 0]), "the token has not seen a patch yet"
    assert not torch.allclose(tokens[0, 0], tokens[1, 0])
    assert any(name.endswith("gamma_1") for name in model.state_dict()) == (init_values is not None)


def test_a_token_that_sees_no_patch_is_refused() -> None:
    for options in ({"class_layers": 0}, {"token_at": 3}, {"token_at": -1}):
        with pytest.raises(RecastError, match="sees no patches: set class_layers"):
            small_vit(**options)


def test_a_resnet50_with_an_mlp() -> None:
    """As in the thesis, table 2.16."""
    with torch.device("meta"):
        model = timm.create_model("grafit_resnet50", num_classes=102)
    assert [type(layer) for layer in model.fc] == [nn.Linear, nn.BatchNorm1d, nn.ReLU, nn.Linear]
    trunk, mlp = 23_508_032, 2048 * 4096 + 4096 + 2 * 4096 + 4096 * 102 + 102
    assert sum(p.numel() for p in model.parameters()) == trunk + mlp
    model.reset_classifier(0)
    assert sum(p.numel() for p in model.parameters()) == trunk


@pytest.mark.parametrize("is_grafit", [False, True])
def test_the_mlp_goes_on_from_a_plain_resnet_and_from_grafit_s(is_grafit: bool, tmp_path: Path) -> None:
    small = {"layers": [1, 1, 1, 1], "hidden": 8}
    plain = timm.create_model("resnet50", layers=small["layers"])
    if is_grafit:
        add_embedding_(plain, Neighbors(dim=4, hidden=4), 1000)
    save_file(plain.state_dict(), tmp_path / "weights.safetensors")
    config = ModelConfig("grafit_resnet50", tmp_path / "weights.safetensors", new_head=True, kwargs=small)
    model = build(config, num_classes=5).eval()
    images = torch.randn(2, 3, 64, 64)
    assert model(images).shape == (2, 5)
    assert model.forward_features(images).equal(plain.eval().forward_features(images))


@pytest.mark.parametrize(("name", "parameters", "gmac"), [("s60", 57_113_508, 951.2), ("b60", 140_612_148, 1256.5)])
def test_the_published_upernets(name: str, parameters: int, gmac: float) -> None:
    """Parameters to the unit, the unused pooling and classifier included; GMAC at 512×2048 without the auxiliary."""
    with torch.device("meta"):
        network = timm.create_model(f"patchconvnet_{name}").eval().requires_grad_(False)
        neck = Neck(network.embed_dim).eval().requires_grad_(False)
        head = UperHead(neck.channels, 150).eval().requires_grad_(False)
        parts = (network, neck, head, fcn_head(network.embed_dim, 150))
        assert sum(p.numel() for part in parts for p in part.parameters()) == parameters
        with FlopCounterMode(display=False) as flops:
            logits = head(neck(network.forward_features(torch.empty(1, 3, 512, 2048))))
    assert logits.shape == (1, 150, 128, 512)
    assert flops.get_total_flops() / 2e9 == pytest.approx(gmac, rel=1e-3)


def test_the_maps_of_the_neck() -> None:
    neck = Neck(4).eval()
    x = torch.randn(1, 4, 4, 6)
    p4, p8, p16, p32 = neck(x)
    assert p16 is x
    # a transposed convolution 2×2 of stride 2 makes a 2×2 tile of every pixel
    tile = torch.einsum("c,cdij->dij", x[0, :, 1, 2], neck.up8.weight) + neck.up8.bias[:, None, None]
    torch.testing.assert_close(p8[0, :, 2:4, 4:6], tile)
    odd = neck(torch.randn(2, 4, 5, 7))
    assert [tuple(m.shape[-2:]) for m in odd] == [(20, 28), (10, 14), (5, 7), (2, 3)]
    torch.testing.assert_close(p32, x.unfold(2, 2, 2).unfold(3, 2, 2).amax((-2, -1)))
    first, norm, second = neck.up4[0], neck.up4[1], neck.up4[3]
    torch.testing.assert_close(p4, second(nn.functional.gelu(norm(first(x)))))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: CMHSAViT(4, 16, 2, 5, mixer="pixels"), "^mixer must be one of token, pixel, got 'pixels'"),
        (lambda: CMHSAViT(4, 16, 2, 5, kernel=4), "^kernel of a mixer must be odd, got 4$"),
        (lambda: CMHSAViT(4, 24, 2, 5, mixer="pixel"), "^patches of 4×4 pixels need a .* 16 channels, got 24 and 24$"),
        (lambda: PixelConv2d(12, 12, 4, 2), "needs an odd kernel, got 4"),
        (lambda: PixelConv2d(16, 12, 3, 4), "patches of 4×4 pixels need a multiple of 16 channels, got 16 and 12"),
        (lambda: PatchConvNet(16, 2, 3, norm_layer="batchnorm"), "layernorm2d, batchnorm2d, got 'batchnorm'"),
        (lambda: PatchConvNet(16, 2, 0, per_class=True), "a token a class needs classes"),
        (lambda: PatchConvNet(20, 1), "a multiple of 8, got 20"),
    ],
)
def test_mistakes(make: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(RecastError, match=message):
        make()
