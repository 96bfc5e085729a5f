"""Attention beside a convolution: exact at γ = 0, the formula's values and gradients, and the convolution untouched."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import timm.layers
import torch
from layer_helpers import issued, outputs_and_gradients
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import recast
from recast import AttentionBeside, RecastConfig, RecastError
from recast.layers.functional import beside, long_maps
from recast.layers.functional.backends import part_by_part, scaled_dot_product, written_out
from recast.surgery.rules import convert, middle_tap
from recast.tracing.cost import layer_cost

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}


def opened(conv: nn.Module, seed: int = 0) -> AttentionBeside:
    """Attention beside a convolution, every tensor of its own moved off the start, logits of size 1."""
    layer = AttentionBeside(conv)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in (layer.query, layer.key, layer.content, layer.gamma):
            weight.copy_(torch.randn(weight.shape, generator=generator, dtype=torch.float64))
        layer.qk_scale.fill_(0.5)
        layer.query.mul_(2), layer.key.mul_(2)
    return layer


def by_loops(layer: AttentionBeside, x: Tensor) -> Tensor:
    """The formula for one image, written out again: pixel by pixel, W_con block by block."""
    y = layer.conv(x[None])[0]
    (channels, height, width), (_, rows, columns), groups = x.shape, y.shape, layer.groups
    pixels, added = x.flatten(1).T, torch.zeros_like(y)
    for i in range(rows):
        for j in range(columns):
            at = ((2 * i + 1) * height - 1) // (2 * rows), ((2 * j + 1) * width - 1) // (2 * columns)
            query, keys = layer.qk_scale * layer.query @ x[:, at[0], at[1]], layer.qk_scale * layer.key @ pixels.T
            logits = keys.T @ query / layer.head_dim**0.5
            gathered = (logits.softmax(0) @ pixels).unflatten(0, (groups, channels // groups))
            blocks = layer.content.unflatten(0, (groups, -1))
            added[:, i, j] = torch.einsum("goc,gc->go", blocks, gathered).flatten()
    return y + layer.gamma[:, None, None] * added


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_closed_it_is_the_convolution_bit_for_bit(dtype: torch.dtype, random_case: Any) -> None:
    """Output and gradients of the convolution, in every backend and memory format."""
    for seed in range(40):
        conv, x, text = random_case(seed, dtype)
        layer = AttentionBeside(copy.deepcopy(conv), tap=middle_tap(conv))
        expected = outputs_and_gradients(conv, x)
        for backend in ("split", "sdpa", "reference"):
            measured = outputs_and_gradients(layer, x, backend)
            assert torch.equal(measured["output"], expected["output"]), text
            assert torch.equal(measured["conv.weight"], expected["weight"]), text
        layer.backend, nhwc = "auto", x.to(memory_format=torch.channels_last)
        following = nn.Conv2d(conv.out_channels, 8, 1, dtype=dtype)
        for images in (nhwc, nhwc[:1]):  # the next convolution chooses its format by strides, those of one image too
            outputs = layer(images), conv(images)
            assert torch.equal(*outputs), text
            formats = {following(output).stride() for output in outputs}
            assert len(formats) == 1 or outputs[0][0, 0].numel() == 1, text  # one pixel fits both


def test_the_reference_is_the_formula(random_case: Any, error_of: Any) -> None:
    for seed in range(40):
        conv, x, text = random_case(seed, torch.float64)
        layer = opened(conv, seed)
        assert error_of(layer.computed_by("reference", x), torch.stack([by_loops(layer, image) for image in x])) <= (
            1e-12
        ), text


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_every_form_is_the_reference(dtype: torch.dtype, random_case: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Output and every gradient: written out, a few images at a time, part by part, by torch's kernels, made again."""
    for seed in range(60):
        conv, x, text = random_case(seed, dtype)
        layer = opened(conv, seed)
        expected = outputs_and_gradients(layer, x, "reference")
        forms = written_out, beside._by_parts(2), part_by_part, scaled_dot_product
        for form, again in (*((form, False) for form in forms), (forms[seed % 4], True)):
            monkeypatch.setattr("recast.layers.beside.choose_attend", lambda *_, form=form: form)
            monkeypatch.setattr(beside, "_is_large", lambda *_, again=again and conv.groups == 1: again)
            measured = outputs_and_gradients(layer, x, "split")
            for name, value in expected.items():
                largest = max(float(value.abs().max()), 1e-3)
                assert float((measured[name] - value).abs().max()) <= TOLERANCE[dtype] * 10 * largest, (
                    text,
                    name,
                    form,
                )


def test_which_form_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def form(channels: int, size: int, backend: str = "split", images: int = 1) -> Any:
        x = torch.empty(images, channels, size, size, device="meta")
        return beside.choose_attend(x, x, backend)

    assert form(64, 8) is written_out
    assert form(8, 32) is part_by_part
    assert form(8, 32, "plain") is written_out
    assert form(64, 8, "sdpa") is scaled_dot_product
    monkeypatch.setattr(long_maps, "MAP_NUMBERS", 64)
    assert form(64, 8, images=4) not in (written_out, part_by_part, scaled_dot_product)


@pytest.mark.parametrize(("channels", "side", "again"), [(512, 14, True), (128, 28, False), (256, 7, False)])
def test_large_gathers_are_made_again(channels: int, side: int, again: bool) -> None:
    """With many keys, or on small maps, that would take more time than the memory is worth."""
    layer = AttentionBeside(nn.Conv2d(channels, channels, 3, padding=1, device="meta"))
    added = layer_cost(layer, channels, side, side).activation_bytes
    added -= layer_cost(layer.conv, channels, side, side).activation_bytes
    assert (added < channels * side**2) == again  # a quarter of the input, in fp32


def test_a_large_layer_has_the_same_bits_without_a_gradient() -> None:
    """And takes no image, and an input that cannot be saved, where nothing needs a gradient."""
    layer, x = opened(nn.Conv2d(264, 8, 1)), torch.randn(1, 264, 8, 16)
    layer.requires_grad_(False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(beside, "MADE_AGAIN", 1000)
        with torch.inference_mode():
            expected, frozen = layer(x), x.clone()
        assert torch.equal(layer(x), expected)
        assert torch.equal(layer(frozen), expected)
        assert torch.equal(layer(x.clone().requires_grad_()), expected)
        assert layer(x[:0]).shape == (0, 8, 8, 16)


def test_a_query_lies_under_its_output() -> None:
    x = torch.arange(56.0).view(1, 1, 7, 8)

    def at(rows: int, columns: int) -> list[list[int]]:
        pixels = beside.query_pixels(x, rows, columns)[0, 0]
        return [(pixels[:, 0] // 8).int().tolist(), (pixels[0] % 8).int().tolist()]

    assert at(7, 8) == [list(range(7)), list(range(8))]
    assert at(4, 4) == [[0, 2, 4, 6], [0, 2, 4, 6]]  # stride 2, padding 1
    assert at(5, 6) == [[0, 2, 3, 4, 6], [0, 1, 3, 4, 5, 7]]  # no padding: spread over the image
    assert at(1, 1) == [[3], [3]]
    assert at(14, 16)[0] == [i // 2 for i in range(14)]  # a transposed convolution
    assert beside.query_pixels(x, 7, 8) is x


class Same(nn.Conv2d):
    """A convolution of another package: padding of its own, and a norm and an activation inside."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes, stride=2)
        self.norm = nn.BatchNorm2d(sizes[1])

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return self.norm(super().forward(nn.functional.pad(x, (1, 1, 1, 1)))).relu() * scale


class Circular(nn.Module):
    """A convolution that inherits nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.in_channels, self.out_channels, self.kernel_size = 4, 6, 3
        self.weight = nn.Parameter(torch.randn(6, 4, 3, 3))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.conv2d(nn.functional.pad(x, (1, 1, 1, 1), "circular"), self.weight)


CONVOLUTIONS: dict[str, Callable[[], nn.Module]] = {
    "another package's": lambda: Same(4, 6, 3),
    "inherits nothing": Circular,
    "weight norm": lambda: parametrizations.weight_norm(nn.Conv2d(4, 6, 3, padding=1)),
    "older weight norm": lambda: nn.utils.weight_norm(nn.Conv2d(4, 6, 3, padding=1)),
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Conv2d(4, 6, 3, padding=1)),
    "standardised": lambda: timm.layers.ScaledStdConv2d(4, 6, 3),
    "depthwise": lambda: nn.Conv2d(4, 4, 3, padding=1, groups=4),
    "1×1": lambda: nn.Conv2d(4, 6, 1),
    "transposed": lambda: nn.ConvTranspose2d(4, 6, 3, 2, 1),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize("kind", CONVOLUTIONS)
def test_any_convolution(kind: str) -> None:
    """Planned by class, exact, trained with its own parameters, and itself again after folding."""
    x, (parent, child) = torch.randn(2, 4, 9, 8), (nn.Sequential(CONVOLUTIONS[kind](), nn.ReLU()) for _ in range(2))
    child.load_state_dict(parent.state_dict())  # torch cannot copy the older weight norm
    recast.recast_(child, recast.plan(parent, x, where="0"))
    inner, before = child[0].conv, {name: p for name, p in child[0].conv.named_parameters()}
    assert recast.verify(parent, child, x, control=True).bitwise
    assert recast.verify(parent, child, x, control=True).telling == "outputs"
    optimizer = torch.optim.SGD(recast.param_groups(child, lr=0.1))
    child.train()(x).square().mean().backward()
    assert all(p.grad is not None for p in before.values())
    optimizer.step()
    assert child[0].gamma.all()
    recast.fold_(child, tol=float("inf"))
    assert child[0] is inner
    assert all(p is before[name] for name, p in inner.named_parameters())


def test_what_does_not_state_its_channels_is_refused() -> None:
    with pytest.raises(RecastError, match="in_channels"):
        AttentionBeside(nn.ReLU())
    with pytest.raises(RecastError, match="gate"):
        AttentionBeside(nn.Conv2d(3, 4, 3), config=RecastConfig("linear"))  # type: ignore[arg-type]


def test_an_optimizer_made_before_goes_on_training_the_kernel() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, before = torch.randn(2, 3, 6, 6), model[0].weight.detach().clone()
    recast.recast_(model, recast.plan(model, x))
    model(x).sum().backward()
    optimizer.step()
    assert not torch.equal(model[0].conv.weight, before)
    assert all(p.numel() for p in model.parameters())


def test_states_of_parent_and_child_fit_each_other() -> None:
    parent = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    other = copy.deepcopy(parent).apply(lambda m: m.reset_parameters() if hasattr(m, "reset_parameters") else None)
    child = recast.recast_(copy.deepcopy(parent), recast.plan(parent, torch.zeros(1, 3, 6, 6)))
    missing, unexpected = child.load_state_dict(other.state_dict(), strict=False)
    assert sorted(missing) == ["0.content", "0.gamma", "0.key", "0.qk_scale", "0.query"]
    assert not unexpected
    assert torch.equal(child[0].conv.weight, other[0].weight)
    again = recast.recast_(copy.deepcopy(parent), recast.plan(parent, torch.zeros(1, 3, 6, 6)))
    again.load_state_dict(child.state_dict())
    assert torch.equal(again[0].conv.weight, other[0].weight)
    again[0].qk_scale.fill_(0.5)
    again[0].reset_parameters()
    assert again[0].qk_scale == 1
    again[0].qk_scale.fill_(0.5)
    again.load_state_dict({key: value for key, value in child.state_dict().items() if key != "0.qk_scale"})
    assert again[0].qk_scale == 1  # what queries and keys without it mean
    recast.fold_(child, tol=float("inf"))
    parent.load_state_dict(child.state_dict())
    assert torch.equal(parent[0].weight, other[0].weight)


def test_the_state_of_a_convolution_with_a_part_named_conv() -> None:
    class Block(nn.Module):
        in_channels, out_channels = 3, 4

        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.conv(x)

    block = Block()
    layer = AttentionBeside(Block())
    _, unexpected = layer.load_state_dict(block.state_dict(), strict=False)
    assert not unexpected
    assert torch.equal(layer.conv.conv.weight, block.conv.weight)
    layer.load_state_dict(copy.deepcopy(layer).state_dict())


def test_a_parametrised_query_attends() -> None:
    layer, x = opened(nn.Conv2d(3, 4, 3)), torch.randn(2, 3, 6, 6)
    expected = layer(x)
    parametrizations.weight_norm(layer, "query")
    torch.testing.assert_close(layer(x), expected)
    assert [name.partition(".")[0] for name in layer.foreign_state()] == ["parametrizations"] * 2  # `save` refuses it


def test_copies_and_pickles_attend() -> None:
    layer, x = opened(nn.Conv2d(3, 4, 3)), torch.randn(2, 3, 6, 6)
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(twin(x), layer(x))
        assert twin.conv is not layer.conv


def test_a_network_may_read_what_its_convolution_states() -> None:
    layer = AttentionBeside(nn.Conv2d(3, 4, 3, stride=2, padding=1))
    assert (layer.kernel_size, layer.stride, layer.padding) == ((3, 3), (2, 2), (1, 1))
    assert layer.weight is layer.conv.weight
    with pytest.raises(AttributeError, match="attention"):
        _ = layer.attention_of_another_kind
    with torch.no_grad():
        layer.gamma.fill_(0.5)
    with pytest.warns(UserWarning, match="loses the trained attention"):
        _ = layer.weight


def test_what_other_code_gives_to_every_module_is_the_layers_own() -> None:
    """thop registers a buffer on all modules, inner ones first; calflops and ptflops set a number on each."""
    layer = AttentionBeside(nn.Conv2d(3, 4, 3))
    for module in (layer.conv, layer):
        module.register_buffer("total_ops", torch.zeros(1))
        module.__flops__ = 0
    layer.conv.total_ops += 7
    layer.conv.__flops__ += 7
    assert (layer.total_ops.item(), layer.__flops__) == (0, 0)
    layer.weight = nn.Parameter(torch.zeros(4, 3, 3, 3))  # what the convolution has had reaches it
    assert layer.conv.weight is layer.weight


def test_pruned_it_is_the_convolution() -> None:
    layer, x = opened(nn.Conv2d(3, 4, 3)), torch.randn(2, 3, 6, 6)
    layer.close_maps_(0.0)
    layer.prune_(iter(()), iter((0,)))
    assert layer.content_heads == (0,)
    layer.prune_((), ())
    assert [*layer.state_dict()] == ["conv.weight", "conv.bias"]
    assert torch.equal(layer(x), layer.conv(x))
    assert layer.fold() is layer.conv
    with pytest.raises(RecastError, match="pruned"):
        layer.attention(x)
    with pytest.raises(RecastError, match="does not have"):
        opened(nn.Conv2d(3, 4, 3)).prune_((), (3,))


def test_open_or_hooked_it_is_not_folded() -> None:
    layer = opened(nn.Conv2d(3, 4, 3))
    assert layer.fold() is layer
    closed = AttentionBeside(nn.Conv2d(3, 4, 3))
    closed.register_forward_hook(lambda *_: None)
    assert closed.fold() is closed


@pytest.mark.parametrize("query_key", ["zero", "random", "similar", "images"])
def test_starts_of_queries_and_keys(query_key: Any) -> None:
    layer = AttentionBeside(nn.Conv2d(6, 4, 3), config=RecastConfig(query_key=query_key))
    assert bool(layer.key.any()) == (query_key != "zero")
    assert torch.equal(layer.query, layer.key) == (query_key == "similar")
    assert layer.head_dim == 6
    assert convert(nn.Conv2d(64, 4, 3), RecastConfig()).head_dim == 32
    assert convert(nn.Conv2d(64, 64, 3, groups=64), RecastConfig()).head_dim == 8


def test_few_operations() -> None:
    """Eight besides the convolution's, ten of a strided one, and no copy: they decide the time of small maps."""
    for stride in (1, 2):
        layer, x = AttentionBeside(nn.Conv2d(64, 64, 3, stride, 1)), torch.randn(1, 64, 8, 8)
        with torch.no_grad(), issued() as added:
            layer(x)
        assert len(added) - 1 == 8 + 2 * (stride == 2), added  # a copy of the queries, a factor for each matrix


@pytest.mark.filterwarnings("ignore:.torch.jit:FutureWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's exporter, of its own code
@pytest.mark.parametrize("kind", ["padded", "strided", pytest.param("unpadded", marks=pytest.mark.slow), "transposed"])
def test_compiled_exported_and_mapped(kind: str, error_of: Any) -> None:
    """Other sizes and batches than the example's."""
    conv = {
        "padded": nn.Conv2d(4, 6, 3, padding=1),
        "strided": nn.Conv2d(4, 4, 3, 2, 1, groups=4),
        "unpadded": nn.Conv2d(4, 6, 3),
        "transposed": nn.ConvTranspose2d(4, 6, 2, 2),
    }[kind]
    layer, x, other = opened(conv).eval(), torch.randn(2, 4, 8, 9), torch.randn(3, 4, 11, 12)
    dynamic = ({0: torch.export.Dim.DYNAMIC, 2: torch.export.Dim.DYNAMIC, 3: torch.export.Dim.DYNAMIC},)
    with torch.no_grad():
        program = torch.export.export(layer, (x,), dynamic_shapes=dynamic, strict=False).module()
        assert error_of(program(other), layer(other)) < 1e-5
        assert error_of(torch.jit.trace(layer, x)(other), layer(other)) < 1e-5
        assert error_of(torch.func.vmap(lambda image: layer(image[None])[0])(x), layer(x)) < 1e-5
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=True)
    assert error_of(compiled(x), layer(x)) < 1e-5
    with pytest.raises(RecastError, match="fx"):
        torch.fx.symbolic_trace(nn.Sequential(layer))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype, error_of: Any) -> None:
    """In half precision, and exact at γ = 0 where logits overflow it."""
    layer, x = opened(nn.Conv2d(16, 8, 3, padding=1)), torch.randn(2, 16, 6, 6)
    half = copy.deepcopy(layer).to(dtype)
    assert error_of(half(x.to(dtype)).float(), layer(x)) < (0.1 if dtype == torch.bfloat16 else 0.02)
    with torch.autocast("cpu", dtype):
        assert error_of(layer(x).float(), half(x.to(dtype)).float()) < 0.1
    with torch.no_grad():
        half.gamma.zero_()
        half.query.mul_(1e3)
        half.key.mul_(1e3)
    large = 100 * x.to(dtype)
    assert torch.equal(half(large), half.conv(large))
