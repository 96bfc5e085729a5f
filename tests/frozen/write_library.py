"""Outputs of the library, held in git: python tests/frozen/write_library.py [FILE …] writes them anew.

A file holds what a function here returns, or what one returns for each name of a table (`EACH`);
`test_library_frozen.py` calls the same functions and compares.
"""

import contextlib
import hashlib
import json
import shlex
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import timm
import torch
from commands import call, platform
from torch import Tensor, nn

import recast
import recast.papers.networks  # registers the networks of our own
from recast import CMHSA, GPSA, Geometry, PoolConfig, RecastConfig
from recast.lab.config import ClassifyConfig, RegularizationConfig
from recast.lab.training.distributed import Interrupted
from recast.lab.training.loop import fit
from recast.layers.config import PAPERS_LAYER

torch.set_num_threads(1)  # sums in one order
FOLDER = Path(__file__).parent
GONE = "(none)"
"""Stands for a key that is not there, in a difference."""


def text(content: dict[str, Any]) -> str:
    entries = (f"{json.dumps(key)}: {json.dumps(value, sort_keys=True)}" for key, value in sorted(content.items()))
    return "{\n" + ",\n".join(entries) + "\n}"


def read(name: str) -> Any:
    return json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))


def plain(value: Any) -> Any:
    """As JSON gives it back: tuples are lists, keys are text."""
    return json.loads(json.dumps(value))


def difference(base: Any, value: Any) -> Any:
    """The changes that make `value` of `base`."""
    changes = {}
    for key in [*value, *(k for k in base if k not in value)]:
        if key not in value:
            changes[key] = GONE
        elif key not in base or base[key] != value[key] or type(base[key]) is not type(value[key]):
            both = isinstance(value[key], dict) and isinstance(base.get(key), dict)
            changes[key] = difference(base[key], value[key]) if both else value[key]
    return changes


def flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the place and the value of everything in a JSON value that holds nothing itself."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from flat(item, f"{path}[{key}]" if isinstance(value, list) else f"{path}.{key}".removeprefix("."))
    if not items:
        yield path, value


def command(*argv: str) -> Any:
    """The JSON that a command prints; its exit code beside it where it is not 0."""
    code, out, err = call(shlex.join(argv))
    if not out.strip():
        return {"exit_code": code, "error": " ".join(err.split())}
    return json.loads(out) | ({"exit_code": code} if code else {})


def digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]


SMALL = ["--img-size", "64"]
LATE = ["layer2.1.*", "layer3.*.conv*", "layer4.*.conv*"]
PLANS: dict[str, list[str]] = {
    "resnet18": ["resnet18", *SMALL],
    "resnet18 beside": ["resnet18", *SMALL, "--gate", "beside"],
    "resnet18 all": ["resnet18", "--img-size", "64x48", "--where", *LATE],
    "resnet18 sigmoid remove": ["resnet18", *SMALL, "--gate", "sigmoid", "--stride", "remove"],
    "convnext pool": ["convnext_atto", *SMALL, "--where", "none", "--pool", "per_class"],
    "mobilenetv3": ["mobilenetv3_small_050", *SMALL, "--stride", "remove"],
    "densenet": ["densenet121", *SMALL, "--where", "features.denseblock4.*"],
    "hrnet": ["hrnet_w18_small", *SMALL, "--where", "incre_modules.*", "downsamp_modules.*"],
    "cifar_resnet20 linear content": ["cifar_resnet20", "--content", "linear", "--where", "stage:1"],
    "cmhsa_vit pixel": ["cmhsa_vit_5_tiny", "--gate", "bias", "--where", "all"],
}
CHOICES = ["--content-heads", "all", "--gaussian-heads", "all", "--project-values"]


def papers_layer(options: list[str]) -> list[str]:
    """The options for content, a Gaussian and W_val in every head, which gates other than linear always have."""
    return [] if "--gate" in options else ["--gate", "linear", *CHOICES]


def packed(planned: Any) -> Any:
    """A plan in fewer words: a step as its difference from the one before; the layers left as a digest."""
    if "steps" not in planned:
        return planned
    steps, before = [], {}
    for step in planned["steps"]:
        if step.get("parent_geometry") == {k: step.get(k) for k in step.get("parent_geometry") or {}}:
            step = step | {"parent_geometry": "its own"}
        steps.append(difference(before, step))
        before = step
    skipped = [layer["name"] for layer in planned["left"]]
    gate = planned["config"]["gate"]
    base = RecastConfig(gate, **{} if gate == "beside" else PAPERS_LAYER)
    config = difference(plain(base.model_dump()), planned["config"])
    config |= {} if gate == "linear" else {"gate": gate}
    return planned | {"config": config, "steps": steps, "left": [len(skipped), digest(skipped)]}


def plan_of(name: str) -> Any:
    return packed(command("plan", *PLANS[name], *papers_layer(PLANS[name]), "--json"))


FEW = ["--num-images", "2"]
VERIFIED: dict[str, list[str]] = {
    "digits_resnet": ["digits_resnet", "--img-size", "16"],
    "digits_resnet beside": ["digits_resnet", "--img-size", "16", "--gate", "beside"],
    "digits_resnet remove": ["digits_resnet", "--img-size", "16", "--stride", "remove"],
    "digits_resnet sigmoid": ["digits_resnet", "--img-size", "16", "--gate", "sigmoid"],
    "digits_resnet bias": ["digits_resnet", "--img-size", "16", "--gate", "bias"],
    "digits_resnet pool": ["digits_resnet", "--where", "none", "--pool", "per_class"],
    "cifar_resnet20": ["cifar_resnet20", "--img-size", "16x24", "--where", "stage:-1", "stage:-2"],
    "cmhsa_vit": ["cmhsa_vit_5_tiny", "--gate", "bias"],
    "mobilenetv3": ["mobilenetv3_small_050", "--img-size", "64", *FEW],
    "regnet": ["regnetx_002", "--img-size", "64", *FEW],
    "resnet18 pool": ["resnet18", "--img-size", "64", "--pool", "single", *FEW],
    "squeezenet": ["torchvision:squeezenet1_1", "--img-size", "64", *FEW],
}


def verification_of(name: str) -> Any:
    """What `recast verify … --json` gives: by form whether it is bitwise the same, the same argmax, and the error."""
    verified = command("verify", *VERIFIED[name], *papers_layer(VERIFIED[name]), "--json")

    def result(comparison: Any) -> list[Any]:
        error = comparison["max_relative_error"]
        rounded = 0.0 if error <= 1e-5 else float(f"{error:.6g}")
        return [comparison["bitwise"], comparison["argmax_agreement"], rounded, comparison["images"]]

    forms = {form: result(comparison) for form, comparison in verified["forms"].items()}
    control = verified["control"]
    return {"same": verified["same"], "forms": forms, "control": control and result(control)}


def disturbed(model: nn.Module, seed: int = 0, scale: float = 0.2) -> nn.Module:
    """Seeded noise on every parameter, in the order of the names: no gate stays closed."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            parameter.add_(scale * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def images(*shape: int, seed: int = 7) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def tiny_network() -> nn.Module:
    """Four kinds of convolution with BatchNorm, a residual, an average and a linear layer."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1, groups=8),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=2, dilation=2, groups=2),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 3),
    )


@torch.no_grad()
def _gpsa(channels: tuple[int, int], geometry: Geometry, groups: int, fold: bool = False, **config: Any) -> nn.Module:
    """A layer; with `fold`, two heads opened and the rest removed."""
    layer: Any = GPSA(
        *channels, geometry, groups=groups, config=RecastConfig(**{"gate": "linear"} | PAPERS_LAYER | config)
    )
    if not fold:
        return layer
    if layer.config.gate == "linear":
        layer.gamma[1], layer.spread[3] = 0.3, 0.4
        return layer.fold()
    layer.lam.fill_(40.0)[2] = 0.5
    return layer.fold(tol=1e-6)


def _cmhsa(channels: tuple[int, int], geometry: Geometry, groups: int) -> nn.Module:
    layer = CMHSA(*channels, geometry, groups=groups, config=RecastConfig(gate="bias", bias_init=5.0))
    layer.set_size_(7, 6)
    return layer


def _beside(channels: tuple[int, int], geometry: Geometry, groups: int) -> nn.Module:
    return recast.AttentionBeside(nn.Conv2d(*channels, geometry.kernel, geometry.stride, 1, groups=groups))


def _pooled(**config: Any) -> nn.Module:
    return recast.attention_pool_(tiny_network(), config=PoolConfig(**config), example=images(2, 3, 16, 16))


def layer_cases() -> dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]]:
    """By name: a function that makes a layer or network, and the shape of what it takes."""
    three, ring = (3, 3), (1, 1, 1, 1)
    shapes: dict[str, tuple[tuple[int, int], Geometry, int]] = {
        "plain": ((6, 4), Geometry(three, padding=ring), 1),
        "strided": ((4, 6), Geometry(three, stride=(2, 2), padding=ring), 1),
        "grouped": ((6, 4), Geometry(three, padding=ring), 2),
        "depthwise": ((4, 4), Geometry(three, padding=ring), 4),
        "dilated": ((4, 4), Geometry(three, padding=(2, 2, 2, 2), dilation=(2, 2)), 1),
        "transposed": ((4, 4), Geometry.of(nn.ConvTranspose2d(4, 4, 3, 2, 1, 1)), 1),
        "same": ((4, 4), Geometry((3, 2), stride=(2, 1), same=True), 1),
        "reflect": ((4, 4), Geometry(three, padding=ring, padding_mode="reflect"), 1),
    }
    cases: dict[str, Any] = {}

    def add(name: str, shape: str, make: Callable[..., nn.Module] = _gpsa, **options: Any) -> None:
        channels = shapes[shape][0]
        cases[name] = partial(make, *shapes[shape], **options), (2, channels[0], 7, 6)

    for shape in shapes:
        add(f"gpsa linear {shape}", shape, gate="linear")
    for shape in ("plain", "depthwise", "transposed"):
        add(f"gpsa sigmoid {shape}", shape, gate="sigmoid")
        for gate in ("linear", "sigmoid"):
            add(f"gpsa {gate} {shape} folded", shape, fold=True, gate=gate)
    add("gpsa linear content", "plain", content="linear")
    add("gpsa attend padding", "plain", attend_padding=True, head_dim=3)
    add("gpsa starts open", "plain", gamma_init=0.2, s_init=0.1, alpha=2.0)
    for backend in ("reference", "dense", "split", "merged"):
        add(f"gpsa {backend}", "plain", backend=backend)
    for shape in ("plain", "strided", "grouped"):
        add(f"cmhsa {shape}", shape, _cmhsa)
        add(f"beside {shape}", shape, _beside)
    pools: dict[str, dict[str, Any]] = {
        "single average": {"kind": "single"},
        "per class average": {"kind": "per_class", "num_heads": 2},
        "single paper, not in keys": {"kind": "single", "start": "paper", "cls_in_keys": False},
        "per class paper, in keys": {"kind": "per_class", "start": "paper", "cls_in_keys": True},
    }
    for name, config in pools.items():
        cases[f"pool {name}"] = partial(_pooled, **config), (2, 3, 16, 16)
    cases["cifar_resnet20_a"] = partial(timm.create_model, "cifar_resnet20_a"), (2, 3, 16, 16)
    cases["cmhsa_vit_5_tiny"] = partial(timm.create_model, "cmhsa_vit_5_tiny", depth=2), (2, 3, 32, 32)
    small = {"embed_dim": 16, "depth": 2, "num_classes": 5}
    for name in ("patchconvnet_s20", "patchconvnet_s20_multi", "patchconvnet_s20_bn"):
        cases[name] = partial(timm.create_model, name, **small), (2, 3, 32, 32)
    return cases


def summary(tensor: Tensor) -> list[float]:
    """Sum and sum of magnitudes, to 6 digits."""
    values = tensor.detach().double()
    return [float(f"{float(v):.6g}") for v in (values.sum(), values.abs().sum())]


@torch.no_grad()
def layer_of(name: str) -> Any:
    """A state dict's names, shapes and dtypes as a digest, its values in sums, and what it gives with all moved."""
    make, shape = layer_cases()[name]
    torch.manual_seed(0)
    model = make().eval()
    state = model.state_dict()
    sums = [summary(t) for t in state.values() if t.is_floating_point()]
    total = [float(f"{sum(column):.6g}") for column in zip(*sums, strict=True)]
    shapes = {key: [str(t.dtype).removeprefix("torch."), list(t.shape)] for key, t in state.items()}
    start = model(images(*shape))
    moved = disturbed(model, scale=0.02 if len(state) > 40 else 0.2)(images(*shape))
    output = {"shape": list(start.shape), "start": summary(start), "moved": summary(moved)}
    return {"state": [len(shapes), digest(shapes)], "total": total, "output": output}


def _saved_models() -> dict[str, nn.Module]:
    x, papers = images(2, 3, 16, 16), RecastConfig("linear", **PAPERS_LAYER)
    settings: dict[str, tuple[RecastConfig, PoolConfig | None]] = {
        "recast_model": (papers, None),
        "recast_beside_model": (RecastConfig(), None),
        "recast_sigmoid_model": (RecastConfig(gate="sigmoid", stride="remove"), None),
        "recast_bias_model": (RecastConfig(gate="bias", bias_init=10.0), None),
        "pooled_model": (papers, PoolConfig("single")),
        "pooled_class_model": (papers, PoolConfig("per_class", start="paper", num_heads=2)),
    }
    models = {}
    for name, (config, pool) in settings.items():
        model = tiny_network().eval()
        where = {"pooled_class_model": "none", "recast_bias_model": ["8"]}.get(name, ["3", "6", "8"])
        models[name] = disturbed(recast.recast_(model, recast.plan(model, x, config, where=where, pool=pool)))
    folded: Any = tiny_network().eval()
    recast.recast_(folded, recast.plan(folded, x, papers, where="all"))
    with torch.no_grad():
        folded[0].gamma[1], folded[0].spread[3], folded[6].gamma[4] = 0.3, 0.4, -0.2
    recast.fold_(folded)
    models["folded_model"] = folded.eval()
    return models


@torch.no_grad()
def output_of(path: Path) -> list[str]:
    """What a saved file's model gives for a fixed input, to the last bit."""
    outputs = recast.load(path, tiny_network())(images(2, 3, 16, 16))
    return [float(value).hex() for value in outputs.flatten()]


def saved() -> Any:
    """What files of `recast.save` give; one that is there stays, as the version before wrote it."""
    outputs = {}
    for name, model in _saved_models().items():
        path = FOLDER / "saved" / f"{name}.safetensors"
        if not path.exists():
            recast.save(model, path)
        outputs[name] = output_of(path)
    return {"platform": platform(), "outputs": outputs}


def _training() -> tuple[nn.Module, Any, Any]:
    """A recast network, 40 images, and a recipe with mixup, an average of weights and accumulated batches."""
    sys.path.append(str(FOLDER.parent / "training"))  # where this file is a script
    from small import small_data, small_parent, small_plan, small_recipe

    recipe = small_recipe(
        {"gate_l1": 0.3, "clip_grad": 1.0, "gate_lr": None},
        regularization=RegularizationConfig(ema_decay=0.9),
        task=ClassifyConfig(mixup=0.8, cutmix=1.0, erasing=0.5, label_smoothing=0.1),
        accumulate=2,
        save_steps=2,
    )
    model = small_parent()
    return recast.recast_(model, small_plan(model, "4", gate="linear", **PAPERS_LAYER)), small_data(), recipe


def trained(folder: Path, resume: bool, stop_at: tuple[int, int] | None = None) -> Any:
    """Losses of the updates and rows, and the final weights in sums; with `stop_at` interrupted there."""
    losses: list[float] = []

    def on_step(epoch: int, step: int, loss: float) -> None:
        losses.append(loss)
        if (epoch, step) == stop_at:
            signal.raise_signal(signal.SIGINT)

    model, data, recipe = _training()
    if resume:
        torch.rand(7)
    with contextlib.suppress(Interrupted):
        rows = fit(model, data, recipe, folder, progress=False, resume=resume, on_step=on_step)
    if stop_at is not None:
        return {"losses": losses}
    clocks = ("seconds", "images_per_second", "data_wait")
    rows = [{key: value for key, value in row.items() if key not in clocks} for row in rows]
    weights = {key: summary(value) for key, value in model.state_dict().items()}
    return plain({"losses": losses, "rows": rows, "weights": weights})


def resume() -> Any:
    """A folder with a training that was interrupted in its second epoch, and how it ends when it goes on."""
    folder = FOLDER / "resume"
    shutil.rmtree(folder, ignore_errors=True)
    begun = trained(folder, resume=False, stop_at=(1, 3))
    with tempfile.TemporaryDirectory() as name:
        straight = trained(Path(name), resume=False)
    rest = straight | {"losses": straight["losses"][len(begun["losses"]) :]}
    return {"platform": platform(), "begun": begun["losses"], "rest": rest}


EACH: dict[str, tuple[Iterable[str], Callable[[str], Any], float]] = {
    "plans": (PLANS, plan_of, 0.0),
    "verify": (VERIFIED, verification_of, 1e-5),
    "state_dicts": (layer_cases(), layer_of, 1e-4),
}
"""Files with an entry for every name: the names, what makes an entry, and how far its numbers may lie from those in git
(errors of rounding are 0 there)."""
WHOLE: dict[str, Callable[[], Any]] = {item.__name__: item for item in (saved, resume)}

if __name__ == "__main__":
    for file in sys.argv[1:] or (*WHOLE, *EACH):
        if file in EACH:
            names, make, _ = EACH[file]
            content = {name: make(name) for name in names}
        else:
            content = WHOLE[file]()
        (FOLDER / f"{file}.json").write_text(text(content) + "\n", encoding="utf-8")
