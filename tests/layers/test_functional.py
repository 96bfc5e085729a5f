"""The attention functions and the operator of long maps: maps, memory, cost, checkpoints, precision, the choice.

`surgery/rules/test_loops.py` has all of them against loops in NumPy.
"""

from typing import Any

import pytest
import torch
from layer_helpers import PAD_1, PAPERS, InCode, outputs_and_gradients
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from recast import GPSA, Geometry, RecastConfig
from recast.layers import functional
from recast.layers.config import PAPERS_LAYER
from recast.layers.functional import long_maps, maps, sigmoid_gates
from recast.layers.functional.long_maps import attend
from recast.tracing.cost import saved_sizes


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_the_operator_passes_torchs_own_checks() -> None:
    """Schema, fake tensors, autograd registration and ahead-of-time dispatch (`torch.library.opcheck`)."""
    tensors = torch.randn(2, 3, 12, 4), torch.randn(2, 3, 4, 10), torch.randn(2, 10, 6)
    for dtype in (torch.float32, torch.bfloat16):
        torch.library.opcheck(attend, tuple(t.to(dtype).requires_grad_() for t in tensors))


def saved(layer: GPSA, x: Tensor, form: str) -> int:
    layer.backend = form
    with saved_sizes(layer) as sizes:
        layer(x.clone().requires_grad_())
    return sum(sizes)


@pytest.mark.parametrize(("content", "gathers"), [("softmax", 1), ("linear", 0)])
def test_of_long_maps_what_content_gathered_alone_is_kept_for_backward(content: str, gathers: int) -> None:
    """28² tokens, 64 channels: the maps would be 22 MB an image, what each kind of map gathers 2 MB."""
    layer, x = (
        GPSA(64, 64, PAD_1, config=RecastConfig("linear", content=content, **PAPERS_LAYER)),
        torch.randn(1, 64, 28, 28),
    )
    gathered = 4 * 9 * 784 * 64
    assert saved(layer, x, "dense") > 4 * 9 * 784**2
    assert gathers * gathered < saved(layer, x, "split") < (gathers + 0.9) * gathered


def test_a_positional_layer_on_a_short_map_keeps_its_input_alone(open_gates: Any) -> None:
    layer = open_gates(GPSA(64, 64, PAD_1, config=PAPERS))
    layer.prune_(range(9), ())
    layer.fold_value_()
    assert saved(layer, torch.randn(8, 64, 7, 7), "merged") == 4 * 8 * 64 * 49


def test_gathers_of_grouped_layers_are_not_kept(open_gates: Any) -> None:
    layer = open_gates(GPSA(16, 16, PAD_1, groups=16, config=PAPERS))
    assert saved(layer, torch.randn(1, 16, 16, 16), "split") < 4 * 9 * 16 * 16**2


@pytest.mark.parametrize("size", [0.1, 40.0])
def test_small_and_large_logits_of_long_maps(size: float, open_gates: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small logits are taken as they are, large ones, of thousands, less the largest of their query."""
    monkeypatch.setattr(long_maps, "MAP_NUMBERS", 2**16)  # a map of 21×21 keys goes in parts
    torch.manual_seed(0)
    layer, x = open_gates(GPSA(6, 6, PAD_1, config=PAPERS)), torch.randn(1, 6, 21, 21)
    with torch.no_grad():
        layer.query.mul_(size), layer.key.mul_(size)
    measured = outputs_and_gradients(layer, x, "split")
    assert all(t.isfinite().all() for t in measured.values())
    expected = outputs_and_gradients(layer.double(), x.double(), "reference")
    for name, value in expected.items():
        atol = max(1e-5, 2e-5 * size) * float(value.abs().max())  # sums of fp32
        torch.testing.assert_close(measured[name].double(), value, rtol=0, atol=atol)


def test_its_cost_is_counted() -> None:
    """Against the products of `dense`, which torch counts itself, on maps without padding."""
    layer, x = GPSA(18, 12, Geometry((3, 3)), config=PAPERS), torch.randn(2, 18, 9, 8, requires_grad=True)
    layer.prune_((), range(9))
    counts = {}
    for form in ("dense", "split"):
        layer.backend = form
        with FlopCounterMode(display=False) as forward:
            y = layer(x)
        with FlopCounterMode(display=False) as backward:
            y.sum().backward()
        counts[form] = forward.get_total_flops(), backward.get_total_flops()
    convolution = 2 * 2 * (7 * 6) * 9 * 18 * 12
    logits = 2 * 2 * (7 * 6) * (9 * 8) * 9 * layer.head_dim
    assert counts["split"] == (counts["dense"][0] + convolution, counts["dense"][1] + 2 * convolution + logits)


@pytest.mark.parametrize("form", ["split", "merged"])
def test_gradient_checkpointing(form: Any, open_gates: Any) -> None:
    layer = open_gates(GPSA(6, 4, PAD_1, config=RecastConfig("linear", backend=form, **PAPERS_LAYER)))
    x = torch.randn(2, 6, 7, 5)
    expected = outputs_and_gradients(layer, x)
    measured = outputs_and_gradients(InCode(lambda m, t: checkpoint(m.layer, t, use_reentrant=False), layer=layer), x)
    for a, b in zip(measured.values(), expected.values(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("form", ["split", "merged", "dense", "sdpa"])
def test_autocast_reaches_what_has_no_product_before(form: Any) -> None:
    """Gaussian maps alone, W_val folded away: the output is of the dtype of a convolution."""
    layer = GPSA(8, 8, PAD_1, config=RecastConfig("linear", backend=form, **PAPERS_LAYER))
    torch.nn.init.constant_(layer.spread, 0.3)
    layer.prune_(range(9), ())
    layer.fold_value_()
    x = torch.randn(2, 8, 6, 6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), layer(x), atol=0.05, rtol=0.02)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer.double()(x.double()).dtype == torch.float64


@pytest.mark.parametrize("form", ["split", "merged", "sdpa"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("gate", "groups"), [("linear", 1), ("sigmoid", 4)])
def test_half_precision_gradients(form: Any, dtype: torch.dtype, gate: Any, groups: int, open_gates: Any) -> None:
    """Autocast against fp32: about as near as `dense`, whose products are torch's own."""
    layer = open_gates(GPSA(16, 16, PAD_1, groups=groups, config=RecastConfig(gate=gate, **PAPERS_LAYER)))
    x = torch.randn(2, 16, 8, 8)
    expected = outputs_and_gradients(layer, x, "reference")
    errors: dict[str, dict[str, float]] = {}
    for backend in ("dense", form):
        with torch.autocast("cpu", dtype=dtype):
            measured = outputs_and_gradients(layer, x, backend)
        errors[backend] = {
            name: float((value.float() - expected[name]).norm() / expected[name].norm())
            for name, value in measured.items()
        }
    step = torch.finfo(dtype).eps
    for name, error in errors[form].items():
        assert error < 2 * errors["dense"][name] + step, name
        assert error < 32 * step, name


@pytest.mark.parametrize("form", ["split", "merged", "sdpa"])
@pytest.mark.parametrize("content", ["softmax", "linear"])
def test_no_images_and_one_pixel(form: Any, content: Any, open_gates: Any) -> None:
    layer = open_gates(GPSA(4, 5, PAD_1, config=RecastConfig("linear", backend=form, content=content, **PAPERS_LAYER)))
    assert layer(torch.randn(0, 4, 6, 5)).shape == (0, 5, 6, 5)
    y = layer(torch.randn(3, 4, 1, 1, requires_grad=True))
    assert y.shape == (3, 5, 1, 1)
    y.sum().backward()


@pytest.mark.parametrize("attend_padding", [False, True])
def test_sdpa_gets_what_torchs_gpu_kernels_take(
    attend_padding: bool, monkeypatch: pytest.MonkeyPatch, open_gates: Any
) -> None:
    """Widths of queries and keys in eights, channels side by side, values of one head for all, keys without padding."""
    config = RecastConfig("linear", backend="sdpa", attend_padding=attend_padding, **PAPERS_LAYER)
    layer = open_gates(GPSA(16, 4, PAD_1, config=config))
    calls, attention = [], torch.nn.functional.scaled_dot_product_attention

    def spy(*tensors: Tensor, **options: Any) -> Tensor:
        calls.append(tensors)
        return attention(*tensors, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    layer(torch.randn(2, 16, 5, 6))
    ((q, k, v),) = calls
    keys = 7 * 8 if attend_padding else 5 * 6
    assert (layer.head_dim, q.shape, k.shape, v.shape) == (1, (2, 9, 30, 8), (2, 9, keys, 8), (2, 9, keys, 16))
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
    assert v.stride(1) == 0


def test_a_gpu_takes_sdpa_for_long_maps_and_writes_short_ones_out() -> None:
    for opened, side, expected in ((1, 28, "split"), (9, 14, "split"), (9, 28, "sdpa"), (1, 56, "sdpa")):
        assert functional.choose_backend(PAD_1, 1, opened, True, "cuda", side * side) == expected
    assert functional.choose_backend(PAD_1, 1, 0, True, "cuda", 14 * 14) == "split", "all heads are closed"
    assert functional.choose_backend(PAD_1, 1, 1, True, "cuda") == "sdpa", "of any size"
    assert functional.choose_backend(PAD_1, 1, 9, True, "cpu") == "merged"


def test_content_of_a_sigmoid_gate_is_never_rounded_to_zero() -> None:
    """1 − σ(λ) is σ(−λ)."""
    assert float(sigmoid_gates(torch.tensor([40.0])).content) > 0


def test_half_precision_positions_reach_across_a_long_map() -> None:
    """bf16 holds no odd integer above 256, fp16 none above 2048 and no square above 65504: positions stay fp32."""
    geometry = Geometry((1, 1))
    for dtype in (torch.float16, torch.bfloat16):
        center, alpha = torch.zeros(1, 2, dtype=dtype), torch.full((1,), 4.0, dtype=dtype)
        _, columns = functional.gaussian_factors(center, alpha, geometry, 1, 401)
        _, exact = functional.gaussian_factors(center.double(), alpha.double(), geometry, 1, 401)
        assert columns[0].argmax(-1).tolist() == list(range(401))
        assert float((columns - exact).abs().max()) < 1e-6


def test_tails_of_gaussians_make_no_subnormal_numbers(open_gates: Any) -> None:
    """A CPU multiplies them many times as slowly: a positional layer took 2.4 times as long."""
    layer = open_gates(GPSA(4, 4, PAD_1, config=RecastConfig("linear", **PAPERS_LAYER)))
    with torch.no_grad():
        rows, columns = maps.weighted_factors(torch.empty(1, 4, 56, 40), layer.weights())
    smallest = [float(factor[factor != 0].abs().min()) for factor in (rows, columns)]
    assert smallest[0] * smallest[1] > 1e6 * torch.finfo(torch.float32).tiny
    assert all(float(factor[..., 0, -1].abs().max()) == 0 for factor in (rows, columns))


def test_linear_content_is_a_map_of_rank_d_whose_rows_sum_to_one(open_gates: Any) -> None:
    layer = open_gates(GPSA(18, 4, PAD_1, config=RecastConfig("linear", content="linear", **PAPERS_LAYER)).double())
    content = layer.attention(torch.randn(2, 18, 5, 6, dtype=torch.float64)).content
    torch.testing.assert_close(content.sum(-1), torch.ones_like(content.sum(-1)))
    assert bool((content >= 0).all())
    assert int(torch.linalg.matrix_rank(content[0, 0])) == layer.head_dim == 2
    ring = maps.real_keys(PAD_1, 5, 6, torch.device("cpu"))
    assert not content[..., ~ring].any()
