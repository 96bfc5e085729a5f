"""CaiT's and ResMLP's variants against the papers' tables, and what sets each apart."""

import pytest
import timm
import torch

from recast.papers.deit.variants import MIXERS, VARIANTS, ResMLP

# millions of parameters as the ResMLP paper's table of ablations prints them
PUBLISHED = {"class": 17.7, "mlp": 18.6, "conv": 30.8, "separable": 16.7}


def small(**options: object) -> ResMLP:
    torch.manual_seed(0)
    sizes = {"img_size": 32, "patch_size": 8, "num_blocks": 2, "embed_dim": 8, "num_classes": 3}
    return ResMLP(**sizes, **options).eval()


@pytest.mark.parametrize(("kind", "millions"), PUBLISHED.items())
def test_parameters_are_the_paper_s(kind: str, millions: float) -> None:
    with torch.device("meta"):
        model = timm.create_model(f"resmlp_12_{kind}")
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, abs=0.05)
    assert f"resmlp_12_{kind}" in VARIANTS


@pytest.mark.parametrize("mixer", ["linear", *MIXERS])
def test_a_mixer_carries_what_it_should_to_other_patches(mixer: str) -> None:
    """16 patches of 8 pixels; one block: none carries nothing, a convolution to the 8 around, others to all."""
    model = small(mixer=mixer)
    model.blocks = model.blocks[:1]
    x = torch.zeros(1, 3, 32, 32)
    other = x.clone()
    other[:, :, 8:16, 8:16] = 1.0  # the patch in the second row and column
    with torch.no_grad():
        changed = (model.forward_features(x) - model.forward_features(other)).abs().amax((0, 2)) > 1e-7
    assert int(changed.sum()) == {"none": 1, "linear": 16, "mlp": 16}.get(mixer, 9)


def test_class_layers_read_the_patches_and_leave_them() -> None:
    model, x = small(class_layers=2), torch.randn(2, 3, 32, 32)
    torch.nn.init.normal_(model.head.weight)  # timm's starts at zero
    tokens = model.forward_features(x)
    before = tokens.clone()
    logits = model.forward_head(tokens)
    assert torch.equal(tokens, before)
    assert logits.shape == (2, 3)
    assert not torch.allclose(logits[0], logits[1])
    assert not torch.allclose(logits, model.forward_head(tokens.flip(1))), "weights are by position"
    assert torch.equal(model.head(model.forward_head(tokens, pre_logits=True)), logits)


def test_patchconvnet_s60_without_its_pooling_or_its_stem() -> None:
    """The pooling has 1,479,936 parameters and a token of 384, the stem 872,208; the sheet's closed forms."""
    with torch.device("meta"):
        average, linear = (timm.create_model(f"patchconvnet_s60_{kind}") for kind in ("average", "linear_stem"))
    counts = [sum(p.numel() for p in model.parameters()) for model in (average, linear)]
    assert counts == [25_231_096 - 1_479_936 - 384, 25_231_096 - 872_208 + 384 * (3 * 16 * 16 + 1)]
