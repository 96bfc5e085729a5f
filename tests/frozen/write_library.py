"""Outputs of the library, held in git: python tests/frozen/write_library.py [FILE …] writes them anew.

A file holds what a function here returns, or what one returns for each name of a table (`EACH`);
`test_library_frozen.py` calls the same functions and compares.
"""

import contextlib
import hashlib
import json
import shlex
import signal
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
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

FOLDER = Path(__file__).parent
GONE = "(none)"
"""Stands for a key that is not there, in a difference."""


# --- files ---------------------------------------------------------------------------------------------------------


def text(content: dict[str, Any]) -> str:
    """JSON with a line for every entry."""
    entries = (f"{json.dumps(key)}: {json.dumps(value, sort_keys=True)}" for key, value in sorted(content.items()))
    return "{\n" + ",\n".join(entries) + "\n}"


def read(name: str) -> Any:
    """The content of a frozen file."""
    return json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))


def plain(value: Any) -> Any:
    """As JSON gives it back: tuples are lists, keys are text."""
    return json.loads(json.dumps(value))


def difference(base: Any, value: Any) -> Any:
    """What makes `value` of `base`."""
    found = {}
    for key in [*value, *(k for k in base if k not in value)]:
        if key not in value:
            found[key] = GONE
        elif key not in base or base[key] != value[key] or type(base[key]) is not type(value[key]):
            both = isinstance(value[key], dict) and isinstance(base.get(key), dict)
            found[key] = difference(base[key], value[key]) if both else value[key]
    return found


def flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the place and the value of everything in a JSON value that holds nothing itself."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from flat(item, f"{path}[{key}]" if isinstance(value, list) else f"{path}.{key}".removeprefix("."))
    if not items:
        yield path, value


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Sums in one order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def command(*argv: str) -> Any:
    """The JSON that a command prints; its exit code beside it where it is not 0."""
    with one_thread():
        code, out, err = call(shlex.join(argv))
    if not out.strip():
        return {"exit_code": code, "error": " ".join(err.split())}
    return json.loads(out) | ({"exit_code": code} if code else {})


# --- plans ---------------------------------------------------------------------------------------------------------

SMALL = ["--img-size", "64"]
LATE = ["layer2.1.*", "layer3.*.conv*", "layer4.*.conv*"]
PLANS: dict[str, list[str]] = {
    "resnet18": ["resnet18", *SMALL],
    "resnet18 all": ["resnet18", "--img-size", "64x48", "--where", *LATE],
    "resnet18 sigmoid remove": ["resnet18", *SMALL, "--gate", "sigmoid", "--stride", "remove"],
    "convnext pool": ["convnext_atto", *SMALL, "--where", "none", "--pool", "per_class"],
    "mobilenetv3": ["mobilenetv3_small_050", *SMALL, "--stride", "remove"],
    "densenet": ["densenet121", *SMALL, "--where", "features.denseblock4.*"],
    "hrnet": ["hrnet_w18_small", *SMALL, "--where", "incre_modules.*", "downsamp_modules.*"],
    "cifar_resnet20 linear content": ["cifar_resnet20", "--content", "linear", "--where", "stage:1"],
    "cmhsa_vit pixel": ["cmhsa_vit_5_tiny", "--gate", "bias", "--where", "all"],
}  # fmt: skip


def papers_layer(options: list[str]) -> list[str]:
    """The options for content, a Gaussian and W_val in every head, which gates other than linear always have."""
    return [] if "--gate" in options else ["--content-heads", "all", "--gaussian-heads", "all", "--project-values"]


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
    left = [layer["name"] for layer in planned["left"]]
    gate = planned["config"]["gate"]
    config = difference(plain(RecastConfig(gate, **PAPERS_LAYER).model_dump()), planned["config"])
    config |= {} if gate == "linear" else {"gate": gate}
    return planned | {"config": config, "steps": steps, "left": [len(left), digest(left)]}


def digest(value: Any) -> str:
    """SHA-256 of a JSON value, its beginning."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]


def plan_of(name: str) -> Any:
    """What `recast plan … --json` gives, packed."""
    return packed(command("plan", *PLANS[name], *papers_layer(PLANS[name]), "--json"))


# --- verify --------------------------------------------------------------------------------------------------------

FEW = ["--num-images", "2"]
VERIFIED: dict[str, list[str]] = {
    "digits_resnet": ["digits_resnet", "--img-size", "16"],
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
ROUNDING = 1e-5


def verification_of(name: str) -> Any:
    """What `recast verify … --json` gives: by form whether it is bitwise the same, the same argmax, and the error."""
    found = command("verify", *VERIFIED[name], *papers_layer(VERIFIED[name]), "--json")

    def result(of: Any) -> list[Any]:
        error = of["max_relative_error"]
        rounded = 0.0 if error <= ROUNDING else float(f"{error:.6g}")
        return [of["bitwise"], of["argmax_agreement"], rounded, of["images"]]

    forms = {form: result(of) for form, of in found["forms"].items()}
    return {"same": found["same"], "forms": forms, "control": found["control"] and result(found["control"])}


# --- layers --------------------------------------------------------------------------------------------------------


def disturbed(model: nn.Module, seed: int = 0, scale: float = 0.2) -> nn.Module:
    """Seeded noise on every parameter, in the order of the names: no gate stays closed."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            parameter.add_(scale * torch.randn(parameter.shape, generator=generator))
    return recast.refresh_gates_(model.eval())


def images(*shape: int, seed: int = 7) -> Tensor:
    """Seeded noise."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def tiny_network() -> nn.Module:
    """Four kinds of convolution with BatchNorm, a residual, an average and a linear layer."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=2, dilation=2, groups=2), nn.ReLU(),
        nn.Conv2d(8, 8, 3, stride=2, padding=1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3),
    )  # fmt: skip


def _gpsa(geometry: Geometry, channels: tuple[int, int], groups: int = 1, fold: bool = False, **config: Any) -> Any:
    """A layer; with `fold`, two heads opened and the rest removed."""

    def make() -> nn.Module:
        layer: Any = GPSA(*channels, geometry, groups=groups, config=RecastConfig(**PAPERS_LAYER | config))
        if fold and layer.config.gate == "linear":
            with torch.no_grad():
                layer.gamma[1], layer.spread[3] = 0.3, 0.4
        elif fold:
            with torch.no_grad():
                layer.lam.fill_(40.0)[2] = 0.5
            return layer.fold(tol=1e-6)
        return layer.fold() if fold else layer

    return make, (2, channels[0], 7, 6)


def _cmhsa(geometry: Geometry, channels: tuple[int, int], groups: int = 1) -> Any:
    def make() -> nn.Module:
        layer = CMHSA(*channels, geometry, groups=groups, config=RecastConfig(gate="bias", bias_init=5.0))
        layer.set_size_(7, 6)
        return layer

    return make, (2, channels[0], 7, 6)


def _pooled(**config: Any) -> Any:
    return lambda: recast.attention_pool_(tiny_network(), config=PoolConfig(**config), example=images(2, 3, 16, 16)), (
        2, 3, 16, 16
    )  # fmt: skip


def _network(name: str, shape: tuple[int, ...], **kwargs: Any) -> Any:
    return lambda: timm.create_model(name, **kwargs), shape


def layer_cases() -> dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]]:
    """By name: a function that makes a layer or network, and the shape of what it takes."""
    three = (3, 3)
    one = (1, 1, 1, 1)
    shapes: dict[str, tuple[Geometry, tuple[int, int], int]] = {
        "plain": (Geometry(three, padding=one), (6, 4), 1),
        "strided": (Geometry(three, stride=(2, 2), padding=one), (4, 6), 1),
        "grouped": (Geometry(three, padding=one), (6, 4), 2),
        "depthwise": (Geometry(three, padding=one), (4, 4), 4),
        "dilated": (Geometry(three, padding=(2, 2, 2, 2), dilation=(2, 2)), (4, 4), 1),
        "transposed": (Geometry.of(nn.ConvTranspose2d(4, 4, 3, 2, 1, 1)), (4, 4), 1),
        "same": (Geometry((3, 2), stride=(2, 1), same=True), (4, 4), 1),
        "reflect": (Geometry(three, padding=one, padding_mode="reflect"), (4, 4), 1),
    }
    cases: dict[str, Any] = {}
    for name, shape in shapes.items():
        cases[f"gpsa linear {name}"] = _gpsa(*shape, gate="linear")
    for name in ("plain", "depthwise", "transposed"):
        cases[f"gpsa sigmoid {name}"] = _gpsa(*shapes[name], gate="sigmoid")
        for gate in ("linear", "sigmoid"):
            cases[f"gpsa {gate} {name} folded"] = _gpsa(*shapes[name], fold=True, gate=gate)
    plain_shape = shapes["plain"]
    cases["gpsa linear content"] = _gpsa(*plain_shape, content="linear")
    cases["gpsa attend padding"] = _gpsa(*plain_shape, attend_padding=True, head_dim=3)
    cases["gpsa starts open"] = _gpsa(*plain_shape, gamma_init=0.2, s_init=0.1, alpha=2.0)
    for backend in ("reference", "dense", "split", "merged"):
        cases[f"gpsa {backend}"] = _gpsa(*plain_shape, backend=backend)
    for name in ("plain", "strided", "grouped"):
        cases[f"cmhsa {name}"] = _cmhsa(*shapes[name])
    cases["pool single average"] = _pooled(kind="single")
    cases["pool per class average"] = _pooled(kind="per_class", num_heads=2)
    cases["pool single paper, not in keys"] = _pooled(kind="single", start="paper", cls_in_keys=False)
    cases["pool per class paper, in keys"] = _pooled(kind="per_class", start="paper", cls_in_keys=True)
    cases["cifar_resnet20_a"] = _network("cifar_resnet20_a", (2, 3, 16, 16))
    cases["cmhsa_vit_5_tiny"] = _network("cmhsa_vit_5_tiny", (2, 3, 32, 32), depth=2)
    small = {"embed_dim": 16, "depth": 2, "num_classes": 5}
    for kind in ("", "_multi", "_bn"):
        cases[f"patchconvnet_s20{kind}"] = _network(f"patchconvnet_s20{kind}", (2, 3, 32, 32), **small)
    return cases


def summary(tensor: Tensor) -> list[float]:
    """Sum and sum of magnitudes, to 6 dig"""
    values = tensor.detach().double()
    return [float(f"{float(v):.6g}") for v in (values.sum(), values.abs().sum())]


def layer_of(name: str) -> Any:
    """A state dict's names, shapes and dtypes as a digest, its values in sums, and what it gives with all moved."""
    make, shape = layer_cases()[name]
    with one_thread():
        torch.manual_seed(0)
        model = make().eval()
        state = model.state_dict()
        total = [summary(t) for t in state.values() if t.is_floating_point()]
        shapes = {key: [str(t.dtype).removeprefix("torch."), list(t.shape)] for key, t in state.items()}
        found: dict[str, Any] = {
            "state": [len(shapes), digest(shapes)],
            "total": [float(f"{sum(column):.6g}") for column in zip(*total, strict=True)],
        }
        with torch.no_grad():
            start = model(images(*shape))
            moved = disturbed(model, scale=0.02 if len(state) > 40 else 0.2)(images(*shape))
        found["output"] = {"shape": list(start.shape), "start": summary(start), "moved": summary(moved)}
    return found


# --- saved files ---------------------------------------------------------------------------------------------------


def _saved_models() -> dict[str, nn.Module]:
    x, papers = images(2, 3, 16, 16), RecastConfig(**PAPERS_LAYER)
    settings: dict[str, tuple[RecastConfig, PoolConfig | None]] = {
        "recast_model": (papers, None),
        "recast_sigmoid_model": (RecastConfig(gate="sigmoid", stride="remove"), None),
        "recast_bias_model": (RecastConfig(gate="bias", bias_init=10.0), None),
        "pooled_model": (papers, PoolConfig("single")),
        "pooled_class_model": (papers, PoolConfig("per_class", start="paper", num_heads=2)),
    }
    found = {}
    for name, (config, pool) in settings.items():
        model = tiny_network().eval()
        where = {"pooled_class_model": "none", "recast_bias_model": ["8"]}.get(name, ["3", "6", "8"])
        planned = recast.plan(model, x, config, where=where, **({} if pool is None else {"pool": pool}))
        found[name] = disturbed(recast.recast_(model, planned))
    folded = tiny_network().eval()
    recast.recast_(folded, recast.plan(folded, x, papers, where="all"))
    with torch.no_grad():
        layers: Any = folded
        layers[0].gamma[1], layers[0].spread[3], layers[6].gamma[4] = 0.3, 0.4, -0.2
    recast.fold_(folded)
    found["folded_model"] = recast.refresh_gates_(folded.eval())
    return found


def hexes(tensor: Tensor) -> list[str]:
    """Every value, exactly."""
    return [float(v).hex() for v in tensor.detach().flatten()]


def output_of(path: Path) -> list[str]:
    """What a saved file's model gives for a fixed input."""
    with one_thread(), torch.no_grad():
        return hexes(recast.load(path, tiny_network())(images(2, 3, 16, 16)))


def saved() -> Any:
    """What files of `recast.save` give; one that is there stays, as the version before wrote it."""
    outputs = {}
    for name, model in _saved_models().items():
        path = FOLDER / "saved" / f"{name}.safetensors"
        if not path.exists():
            recast.save(model, path)
        outputs[name] = output_of(path)
    return {"platform": platform(), "outputs": outputs}


# --- resume --------------------------------------------------------------------------------------------------------


def _training() -> tuple[nn.Module, Any, Any]:
    """A recast network, 40 images, and a recipe with mixup, an average of weights and accumulated batches."""
    sys.path.append(str(FOLDER.parent / "training"))  # where this file is a script
    from small import small_data, small_parent, small_plan, small_recipe

    recipe = small_recipe(
        {"gate_l1": 0.3, "clip_grad": 1.0, "gate_lr": None},
        regularization=RegularizationConfig(ema_decay=0.9),
        task=ClassifyConfig(mixup=0.8, cutmix=1.0, erasing=0.5, label_smoothing=0.1),
        accumulate=2, save_steps=2,
    )  # fmt: skip
    model = small_parent()
    return recast.recast_(model, small_plan(model, "4", **PAPERS_LAYER)), small_data(), recipe


def trained(folder: Path, resume: bool, stop_at: tuple[int, int] | None = None) -> Any:
    """Losses of the updates and rows, and the final weights in sums; with `stop_at` interrupted there."""
    losses: list[float] = []

    def on_step(epoch: int, step: int, loss: float) -> None:
        losses.append(loss)
        if (epoch, step) == stop_at:
            signal.raise_signal(signal.SIGINT)

    with one_thread():
        model, data, recipe = _training()
        if stop_at is not None:
            with contextlib.suppress(Interrupted):
                fit(model, data, recipe, folder, progress=False, resume=resume, on_step=on_step)
            return {"losses": losses}
        if resume:
            torch.rand(7)
        rows = fit(model, data, recipe, folder, progress=False, resume=resume, on_step=on_step)
    clocks = ("seconds", "images_per_second", "data_wait")
    rows = [{key: value for key, value in row.items() if key not in clocks} for row in rows]
    weights = {key: summary(value) for key, value in model.state_dict().items()}
    return plain({"losses": losses, "rows": rows, "weights": weights})


def resume() -> Any:
    """A folder with a training that was interrupted in its second epoch, and how it ends when it goes on."""
    folder = FOLDER / "resume"
    for path in sorted(folder.rglob("*"), reverse=True) if folder.exists() else []:
        path.rmdir() if path.is_dir() else path.unlink()
    begun = trained(folder, resume=False, stop_at=(1, 3))
    with tempfile.TemporaryDirectory() as other:
        straight = trained(Path(other), resume=False)
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
