"""Where Recast meets a user's own loop, network and tools: nothing is lost or switched off without a word."""

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from layer_helpers import PAPERS
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FSDPModule
from torch.nn.utils import parametrizations, prune
from torch.testing._internal.two_tensor import TwoTensor

import recast
from recast import CMHSA, GPSA, RecastConfig, RecastError
from recast.layers.cmhsa import recast_layers

X = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(0))
CONFIGS = {
    "beside": RecastConfig(),
    "linear": PAPERS,
    "sigmoid": RecastConfig("sigmoid"),
    "bias": RecastConfig("bias"),
    "no Gaussians": RecastConfig("linear", gaussian_heads="none", content_heads="all"),
}


def small() -> nn.Module:
    torch.manual_seed(0)
    features = [nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.Sequential(nn.Conv2d(8, 8, 3, padding=1))]
    return nn.Sequential(*features, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)).eval()


def recast_with(config: RecastConfig, model: nn.Module | None = None) -> nn.Module:
    model = small() if model is None else model
    return recast.recast_(model, recast.plan(model, X, config, where=["3.0"]))


# --- the own loop -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONFIGS)
def test_an_optimizer_that_was_built_before_trains_the_kernel_on(name: str) -> None:
    model = small().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = [(model[3][0].weight, model[3][0].weight.detach().clone()), (model[3][0].bias, None)]
    recast_with(CONFIGS[name], model)
    held = {id(p) for p in model.parameters()}
    assert all(id(parameter) in held for parameter, _ in before)
    model(X).square().sum().backward()
    optimizer.step()
    assert not torch.equal(*before[0])


@pytest.mark.parametrize("name", CONFIGS)
def test_no_parameter_is_without_elements(name: str) -> None:
    model = recast_with(CONFIGS[name])
    (layer,) = recast_layers(model).values()
    assert all(parameter.numel() for parameter in model.parameters())
    if not isinstance(layer, CMHSA) and name != "sigmoid":
        layer.prune_((), ())
        assert all(parameter.numel() for parameter in layer.parameters())
        assert torch.allclose(model(X), small()(X), atol=1e-6)
        state = copy.deepcopy(model.state_dict())
        model.load_state_dict(state)
        assert not any("gamma" in key for key in state)


def stepped(model: nn.Module) -> nn.Module:
    model.train().zero_grad()
    F.cross_entropy(model(X), torch.arange(4)).backward()
    return model


def test_awake_tells_what_keeps_attention_asleep() -> None:
    model = small()
    early = torch.optim.AdamW(model.parameters(), lr=1e-3)
    recast_with(RecastConfig(), model)
    found = recast.awake(model, X, early)
    assert (found.attending, found.heads, found["3.0"].open_gates) == (0, 1, 0)
    assert found["3.0"].outside == ("query", "key", "content", "gamma")
    assert "4 parameters of 3.0 are in no optimizer group" in str(found)
    assert "recast.wake_" in str(found)
    assert "learn no faster than the kernel" in str(recast.awake(model, X, torch.optim.AdamW(model.parameters())))
    optimizer = torch.optim.AdamW(recast.param_groups(model, lr=1e-3))
    assert "learn no faster" not in str(recast.awake(model, X, optimizer))
    assert recast.awake(stepped(model), X, optimizer)["3.0"].without_gradient == ()
    model[3][0].query.grad = None
    assert recast.awake(model, X, optimizer)["3.0"].without_gradient == ("query",)
    model[3].requires_grad_(False)
    assert "parameters of 3.0 are frozen" in str(recast.awake(model, X, optimizer))
    assert model.training
    model[3].requires_grad_(True)
    recast.wake_(model, X)
    with torch.no_grad():
        model[3][0].gamma.fill_(5)
    opened = recast.awake(model, X)
    assert (opened.attending, opened["3.0"].open_gates) == (1, 1)
    assert str(opened).startswith("1 of 1 heads attend")
    with recast.record(model) as maps:
        model(X)
    assert "1 of 1 heads attend" in str(maps)


def test_awake_counts_what_a_wide_layer_has_and_refuses_what_it_cannot_measure() -> None:
    model = recast_with(PAPERS)
    recast.wake_(model, X)
    with torch.no_grad():
        model[3][0].gamma[2] = 0.9
    found = recast.awake(model, [X[:2], X[2:]])["3.0"]
    assert (found.heads, found.attending, found.open_gates) == (9, 1, 1)
    with pytest.raises(RecastError, match="NaN"):
        recast.awake(model, X * float("nan"))
    with pytest.raises(RecastError, match="no recast layer"):
        recast.awake(small(), X)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", CONFIGS)
def test_records_count_heads_in_any_precision(name: str, dtype: torch.dtype) -> None:
    model = recast_with(CONFIGS[name]).to(dtype)
    with recast.record(model) as maps:
        model(X.to(dtype))
    assert "heads attend" in repr(maps)


@pytest.mark.parametrize(("images", "said"), [(X[:1], "one image"), (torch.zeros(4, 3, 16, 16), "3.0.*constant")])
def test_wake_says_when_images_tell_nothing(images: Tensor, said: str) -> None:
    model = recast_with(RecastConfig())
    with pytest.warns(UserWarning, match=said):
        recast.wake_(model, images)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        recast.wake_(model, X)


# --- the own network --------------------------------------------------------------------------------------------------


class Hyper(nn.Module):
    """Computes the weight of its convolution in every pass."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.make, self.z = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(4, 216), nn.Parameter(torch.randn(4))
        del self.conv.weight
        self.conv.weight = torch.zeros(8, 3, 3, 3)

    def forward(self, x: Tensor) -> Tensor:
        self.conv.weight = self.make(self.z).view(8, 3, 3, 3)
        return self.conv(x)


def test_a_weight_that_other_code_sets_reaches_the_convolution_beside_and_is_refused_elsewhere() -> None:
    parent = Hyper().eval()
    child = recast.recast_(copy.deepcopy(parent), recast.plan(parent, X))
    with torch.no_grad():
        parent.z.add_(1)
        child.z.add_(1)
    assert torch.equal(child(X), parent(X))
    assert recast.verify(parent, child, X).ok()
    child.train()(X).sum().backward()
    with pytest.raises(RecastError, match="a weight that is no parameter: other code sets it"):
        recast.plan(parent, X, PAPERS)


class ByClass(nn.Module):
    """Treats its layers by their class, in one of several ways."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.l = how, nn.ModuleList([nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.l:
            is_conv = {
                "isinstance": isinstance(layer, nn.Conv2d),
                "type": type(layer) is nn.Conv2d,
                "name": "Conv2d" in type(layer).__name__,
                "table": {nn.Conv2d: True}.get(type(layer), False),
                "none": True,
            }[self.how]
            if is_conv and self.how == "type":
                x = layer(F.pad(x, (1,) * 4, "reflect"))[..., 1:-1, 1:-1]
            elif is_conv or isinstance(layer, nn.ReLU) or self.how == "type":
                x = layer(x)
        return x


@pytest.mark.parametrize("config", [RecastConfig(), PAPERS])
@pytest.mark.parametrize("how", ["isinstance", "type", "name", "table"])
def test_a_network_that_asks_for_the_class_of_a_layer_is_refused(how: str, config: RecastConfig) -> None:
    with pytest.raises(RecastError, match=r"l\.\d .*by its class \(isinstance"):
        recast.plan(ByClass(how), X, config, where="all")
    assert recast.plan(ByClass("none"), X, config, where="all").steps


class Adapted(nn.Module):
    """A convolution with an adapter, in the form of peft."""

    def __init__(self, base: nn.Conv2d) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_A = nn.ModuleDict({"default": nn.Conv2d(base.in_channels, 2, 3, padding=1, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Conv2d(2, base.out_channels, 1, bias=False)})

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x))


def test_adapters_and_what_they_adapt_are_left_alone() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), Adapted(nn.Conv2d(8, 8, 3, padding=1))).eval()
    planned = recast.plan(model, X, where="all")
    assert [step.name for step in planned.steps] == ["0"]
    left = {layer.name: layer.reason for layer in planned.left}
    assert "merge it first" in left["1.base_layer"]
    assert "merge it first" in left["1.lora_A.default"]
    assert [step.name for step in recast.plan(model, X).steps] == ["0"]
    with pytest.raises(RecastError, match="adapter 1: merge it first"):
        recast.plan(model, X, where=["1.base_layer"])


def test_a_patch_embedding_has_a_reason_of_its_own() -> None:
    model = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=1)
    with pytest.raises(RecastError, match=r"patch_embed\.proj has kernels that do not overlap"):
        recast.plan(model, torch.randn(1, 3, 64, 64))


WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "channels last": (lambda: recast.plan(small(), X.permute(0, 2, 3, 1)), r"images\.permute\(0, 3, 1, 2\)"),
    "bytes": (lambda: recast.plan(small(), (X * 9).to(torch.uint8)), r"images\.float\(\) / 255"),
    "numpy": (lambda: recast.plan(small(), X.numpy()), r"torch\.from_numpy"),
    "a loader": (
        lambda: recast.plan(small(), torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X))),
        r"next\(iter\(loader\)\)\[0\]",
    ),
    "half weights": (lambda: recast.awake(recast_with(RecastConfig()).half(), X), r"images\.to\(torch\.float16\)"),
    "NaN": (lambda: recast.verify(small(), recast_with(RecastConfig()), X * float("nan")), "NaN or infinity"),
    "no such layer": (lambda: recast.plan(small(), X, where="layer4"), r"0, 3\.0"),
    "no such module": (lambda: recast.save(small(), "a.safetensors", "no_such:build"), "no module no_such"),
    "classes": (lambda: recast.save(small(), "a.safetensors", classes=["a", "b"]), "2 names, but no layer"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_mistake_is_named_with_its_cure(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    call, said = WRONG[case]
    with pytest.raises(RecastError, match=said):
        call()
    assert not list(tmp_path.iterdir())


# --- other tools ------------------------------------------------------------------------------------------------------


def test_reading_what_holds_no_value_is_no_reading_of_the_kernel() -> None:
    layer = recast_with(PAPERS)[3][0]
    with torch.no_grad():
        layer.gamma.fill_(0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            X.to(layer.weight.dtype).to(layer.weight.device)
            torch.zeros(layer.weight.shape)
    with pytest.warns(UserWarning, match="loses the trained attention"):
        layer.weight.sum()
    with pytest.warns(UserWarning, match="loses the trained attention"):  # another reader
        nn.functional.conv2d(torch.ones(1, 8, 3, 3), layer.weight)


def test_a_merge_into_the_convolution_beside_attention_keeps_both() -> None:
    model = recast_with(RecastConfig())
    layer = model[3][0]
    with torch.no_grad():
        layer.gamma.fill_(0.5)
        added, before = torch.randn(8, 8, 3, 3), layer(torch.ones(1, 8, 4, 4))
        with pytest.warns(UserWarning, match="loses the trained attention"):
            layer.weight += added
        expected = before + F.conv2d(torch.ones(1, 8, 4, 4), added, padding=1)
        assert torch.allclose(layer(torch.ones(1, 8, 4, 4)), expected, atol=1e-5)


def test_an_adapter_in_the_convolution_is_not_taken_for_one_of_the_layer() -> None:
    """peft merges what has `base_layer`, or its method, and puts the result in the place of the whole."""
    layer = recast_with(RecastConfig())[3][0]
    layer.conv = Adapted(layer.conv)
    layer.conv.merge = lambda: None
    assert not any(hasattr(layer, name) for name in ("base_layer", "lora_A", "merge"))
    layer.conv.padding = 1
    assert layer.padding == 1


class Tokens(nn.Conv2d):
    """Has a method that its network calls."""

    def tokens(self, x: Tensor) -> Tensor:
        return self(x).flatten(2)


class UsesMethod(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = Tokens(3, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv.tokens(x)


def test_a_network_that_calls_a_method_of_the_convolution_is_refused() -> None:
    with pytest.raises(RecastError, match=r"conv is treated by its class .*a method"):
        recast.plan(UsesMethod(), X)


WRAPPINGS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "compiled": lambda part: torch.compile(part, backend="eager"),
    "checkpointed": checkpoint_wrapper,
    "both": lambda part: torch.compile(checkpoint_wrapper(part), backend="eager"),
}


@pytest.mark.parametrize("config", [RecastConfig(), PAPERS])
@pytest.mark.parametrize("wrapping", WRAPPINGS)
@pytest.mark.parametrize("first", ["wrapped", "recast"])
@torch.no_grad()
def test_a_wrapped_part_has_the_names_of_the_plain_network(
    wrapping: str, first: str, config: RecastConfig, tmp_path: Path
) -> None:
    parent, model = small(), small()
    torch._dynamo.reset()
    if first == "wrapped":
        model[3] = WRAPPINGS[wrapping](model[3])
    planned = recast.plan(model, X, config, where="3.*")
    assert [step.name for step in planned.steps] == ["3.0"]
    recast.recast_(model, planned)
    if first == "recast":
        model[3] = WRAPPINGS[wrapping](model[3])
    assert recast.verify(parent, model, X).ok()
    with torch.no_grad():
        recast_layers(model)["3.0"].gamma.fill_(0.5)
    loaded = recast.load(recast.save(model, tmp_path / "a.safetensors"), parent)
    assert torch.allclose(loaded(X), model(X), atol=1e-6)
    with recast.record(model) as maps:
        model(X)
    assert [*maps] == [*recast.awake(model, X)] == ["3.0"]
    wrapped_parent = small()
    wrapped_parent[3] = WRAPPINGS[wrapping](wrapped_parent[3])
    again = recast.load(tmp_path / "a.safetensors", wrapped_parent)
    assert torch.allclose(again(X), model(X), atol=1e-6)
    assert [folded.name for folded in recast.fold_(model, tol=1)] == ["3.0"]


AFTERWARDS: dict[str, Callable[[nn.Module], Any]] = {
    "pruned": lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
    "weight norm": parametrizations.weight_norm,
    "spectral norm": parametrizations.spectral_norm,
}


@pytest.mark.parametrize("config", [RecastConfig(), PAPERS])
@pytest.mark.parametrize("what", AFTERWARDS)
def test_what_was_put_on_a_weight_after_recasting_is_refused_at_save_and_not_folded_away(
    what: str, config: RecastConfig, tmp_path: Path
) -> None:
    model = recast_with(config)
    layer = model[3][0]
    AFTERWARDS[what](layer if isinstance(layer, GPSA) else layer.conv)
    expected = model.eval()(X)
    with pytest.raises(RecastError, match=r"3\.0 got .* after it was recast, which load cannot rebuild"):
        recast.save(model, tmp_path / "a.safetensors")
    recast.fold_(model)
    assert torch.allclose(model(X), expected, atol=1e-6)
    assert any("orig" in key for key in model.state_dict())


def test_pruning_the_layer_beside_names_the_convolution() -> None:
    layer = recast_with(RecastConfig())[3][0]
    before = [*layer.state_dict()]
    with pytest.raises(RecastError, match=r"takes no parameter 'weight_orig': pass the convolution in it, \.conv"):
        prune.l1_unstructured(layer, "weight", 0.5)
    assert [*layer.state_dict()] == before


def test_a_quantized_tensor_is_named(tmp_path: Path) -> None:
    model = small()
    weight = model[6].weight.detach()
    model[6].weight = nn.Parameter(TwoTensor(weight, weight))
    with pytest.raises(RecastError, match=r"6\.weight is a TwoTensor, not a plain tensor: save before quantizing"):
        recast.save(model, tmp_path / "a.safetensors")


class Sharded(nn.Sequential, FSDPModule):  # type: ignore[misc]
    """As `fully_shard` leaves a module, whether its weights are gathered or not."""

    def __new__(cls, *args: Any) -> Any:
        return object.__new__(cls)


def test_a_sharded_network_is_refused_while_its_weights_are_gathered(tmp_path: Path) -> None:
    model, child = Sharded(*small()), Sharded(*recast_with(RecastConfig()))
    for call in (
        lambda: recast.plan(model, X),
        lambda: recast.recast_(model, recast.plan(small(), X)),
        lambda: recast.wake_(child, X),
        lambda: recast.awake(child, X),
        lambda: recast.tune_(child, X),
        lambda: recast.fold_(child),
        lambda: recast.record(child).__enter__(),
        lambda: recast.export(child, X, tmp_path / "a.pt2"),
    ):
        with pytest.raises(RecastError, match=r"sharded \(FSDP\): do this before"):
            call()
