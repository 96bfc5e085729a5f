"""One form of example and of output for every verb: what `plan` and `verify` take, the others take too."""

import copy
from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from layer_helpers import InCode, recast_copy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import recast
from recast import RecastError
from recast.lab.analysis.grad_cam import grad_cam
from recast.lab.config import DataConfig
from recast.lab.data import load_data
from recast.lab.evaluation import evaluate
from recast.surgery.scales import recalibrate_batch_norm_
from recast.tracing.batches import read_batches
from recast.tracing.examples import batch_of, part_of
from recast.tracing.outputs import answer_of, leaves_of

IMAGES, META, LABELS = torch.randn(32, 3, 16, 16), torch.randn(32, 2), torch.arange(32) % 4
ONE = torch.zeros(3, 8, 8)


class Two(nn.Module):
    """Images and what is known of them, in this order."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 6, 3, 2, 1), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 6, 3))
        self.pool, self.head = nn.AdaptiveAvgPool2d(1), nn.Linear(8, 4)

    def forward(self, image: Tensor, meta: Tensor) -> Any:
        return self.head(torch.cat([self.pool(self.body(image)).flatten(1), meta], 1))


class MetaFirst(Two):
    def forward(self, meta: Tensor, image: Tensor) -> Any:
        return {"loss": image.new_zeros(()), "logits": super().forward(image, meta)}


class Writes(Two):
    def forward(self, image: Tensor, meta: Tensor) -> Any:
        return super().forward(image.mul_(2), meta)


EXAMPLES: dict[str, tuple[type[Two], Any]] = {
    "tuple": (Two, (IMAGES, META)),
    "mapping": (Two, {"image": IMAGES, "meta": META}),
    "mapping, metadata first": (Two, {"meta": META, "image": IMAGES}),
    "user's mapping": (Two, UserDict(image=IMAGES, meta=META)),
    "tuple, metadata first": (MetaFirst, (META, IMAGES)),
    "a network that writes into its images": (Writes, (IMAGES, META)),
}


@pytest.mark.parametrize("case", EXAMPLES)
def test_every_verb_takes_the_example_of_plan(case: str, tmp_path: Path) -> None:
    build, example = EXAMPLES[case]
    model, before = build().eval(), IMAGES.clone()
    planned = recast.plan(model, example)
    reference = recast.plan(Two().eval(), (IMAGES, META))
    assert (planned.before, planned.after) == (reference.before, reference.after)
    child = recast.recast_(copy.deepcopy(model), planned)
    assert recast.verify(model, child, example).images == 32
    assert recast.verify(model, child, example).ok()
    (woken,) = recast.wake_(child, example)
    assert recast.wake_(child, [(example, LABELS)])[0].entropy_after == woken.entropy_after < 0.99
    (folded,) = recast.fold_(copy.deepcopy(child), data=example)
    assert folded.output_error < 1e-5
    pooled = recast.plan(model, example, where="none", pool=recast.PoolConfig("single"))
    assert pooled.place.name == "pool"
    assert recast.attention_pool_(copy.deepcopy(model), example=example).pool is not model.pool
    exported = recast.export(child, example, tmp_path / "two.pt2")
    assert exported.any_size
    assert max(check.error for check in exported.checks) < 1e-5
    norm = copy.deepcopy(model.body)
    recalibrate_batch_norm_(model, example)
    recalibrate_batch_norm_(norm, IMAGES * 2 if build is Writes else IMAGES)
    assert torch.equal(model.body[1].running_mean, norm[1].running_mean)
    assert torch.equal(IMAGES, before)


@pytest.mark.parametrize(
    ("example", "images"),
    [
        (torch.zeros(5, 3, 8, 8), 5),
        ((torch.zeros(7, 2), torch.zeros(5, 3, 8, 8)), 5),
        ((torch.zeros(4, 1, 8, 8), torch.zeros(4, 3, 8, 8)), 4),
        ((torch.zeros(1, 1, 8, 8), torch.zeros(4, 3, 8, 8)), 4),
        ({"sizes": torch.zeros(9), "images": torch.zeros(5, 3, 8, 8)}, 5),
        ({"text": "a cat", "images": [ONE, ONE]}, 2),
        ([ONE, ONE, ONE], 3),
        (([ONE, ONE], [{"boxes": torch.zeros(7, 4)}] * 2), 2),
        ([{"image": ONE, "height": 8, "file": "a.png"}] * 4, 4),
        (([{"image": ONE}] * 4,), 4),
        (torch.zeros(6, 8, 8), 6),
        (torch.zeros(2, 9, 3, 8, 8), 2),
    ],
)
def test_images_in_an_example(example: Any, images: int) -> None:
    assert batch_of(example) == images


def test_a_part_has_the_rows_of_its_images() -> None:
    part: Any = part_of({"image": IMAGES, "meta": META, "scale": torch.ones(3), "name": "x"}, slice(1, 3))
    assert torch.equal(part["image"], IMAGES[1:3])
    assert torch.equal(part["meta"], META[1:3])
    assert (len(part["scale"]), part["name"]) == (3, "x")


class Optional(nn.Module):
    def forward(self, x: Any, mask: Any = None) -> Any:
        return x, mask


MASKS, SPLIT = torch.zeros(32, 16, 16).long(), IMAGES.split(16)
BATCHES: list[tuple[type[nn.Module], Any, list[bool]]] = [
    (nn.Identity, IMAGES, [False]),
    (nn.Identity, SPLIT, [False, False]),
    (nn.Identity, (IMAGES, LABELS), [True]),
    (nn.Identity, [IMAGES, LABELS], [True]),
    (nn.Identity, [IMAGES, MASKS], [True]),
    (nn.Identity, [(IMAGES, LABELS)] * 2, [True, True]),
    (nn.Identity, [ONE, ONE, ONE], [False]),
    (nn.Identity, [[ONE, ONE], [ONE, ONE]], [False, False]),
    (nn.Identity, DataLoader(TensorDataset(IMAGES, LABELS), 16), [True, True]),
    (Optional, (IMAGES, META), [False]),
    (Optional, [(IMAGES, LABELS)], [True]),
    (Optional, [[ONE, ONE], [ONE, ONE]], [False, False]),
    (Two, (IMAGES, LABELS), [False]),
    (Two, [(IMAGES, META)] * 2, [False, False]),
    (Two, [((IMAGES, META), LABELS)], [True]),
    (Two, [({"image": IMAGES, "meta": META}, LABELS)], [True]),
]


@pytest.mark.parametrize(("network", "data", "labelled"), BATCHES)
def test_batches_and_whether_they_have_labels(network: type[nn.Module], data: Any, labelled: list[bool]) -> None:
    assert [labels is not None for _, labels in read_batches(network(), data)] == labelled


def test_images_of_detectors_count_one_by_one() -> None:
    def sums(m: Any, batch: list[dict[str, Any]]) -> list[dict[str, Tensor]]:
        return [{"sums": m.conv(item["image"][None]).sum((2, 3))} for item in batch]

    model = InCode(sums, conv=nn.Conv2d(3, 4, 3)).eval()
    example = [{"image": torch.randn(3, 8, 8), "height": 8, "file": "a.png"}] * 3
    planned = recast.plan(model, example)
    assert planned.before.macs == 4 * 6 * 6 * 27
    child = recast.recast_(copy.deepcopy(model), planned)
    assert recast.verify(model, child, example).images == 3
    assert len(recast.wake_(child, example)) == 1
    assert recast.fold_(child, data=example)[0].output_error == 0


@pytest.mark.parametrize("verb", ["plan", "verify", "wake_", "fold_", "export"])
def test_one_image_is_no_batch(verb: str, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3)).eval()
    child = recast_copy(model, IMAGES)
    call: Callable[[], Any] = {
        "plan": lambda: recast.plan(model, IMAGES[0]),
        "verify": lambda: recast.verify(model, child, IMAGES[0]),
        "wake_": lambda: recast.wake_(child, IMAGES[0]),
        "fold_": lambda: recast.fold_(child, data=IMAGES[0]),
        "export": lambda: recast.export(child, IMAGES[0], tmp_path / "x.pt2"),
    }[verb]
    with pytest.raises(RecastError, match=r"3, 16, 16"):
        call()


@dataclass
class Result:
    logits: Tensor
    features: Tensor


WRAPS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "mapping": lambda y, f: {"features": f, "logits": y},
    "tuple": lambda y, f: (y, f),
    "dataclass": Result,
    "user's mapping": lambda y, f: UserDict(logits=y, features=f),
}


@pytest.mark.parametrize("wrap", WRAPS)
def test_every_verb_reads_the_outputs_that_verify_compares(wrap: str) -> None:
    def wrapped_logits(m: Any, x: Tensor) -> Any:
        features = m.net.forward_features(x)
        return WRAPS[wrap](m.net.forward_head(features), features)

    net = timm.create_model("resnet10t", num_classes=10, zero_init_last=False)
    model, plain = InCode(wrapped_logits, net=net).eval(), InCode(lambda m, x: m.net(x), net=net).eval()
    x = torch.randn(2, 3, 64, 64)
    child = recast_copy(model, x, recast.RecastConfig())
    assert recast.verify(model, child, x).predictions == 2
    child.net.layer4[0].conv2.gamma.data.fill_(0.1)
    assert 0 < recast.fold_(child, tol=1.0, data=x)[-1].output_error < 1
    data = load_data(DataConfig(num_val=20))
    wrapped, direct = (evaluate(m, "fgsm", data, progress=False) for m in (model, plain))
    assert [row.value for row in wrapped] == [row.value for row in direct]
    targets = torch.zeros(2, 1, dtype=torch.long)
    assert torch.equal(grad_cam(model, x, targets), grad_cam(plain, x, targets))
    expected = plain(x)
    assert torch.allclose(answer_of(recast.attention_pool_(model, example=x)(x)), expected, atol=1e-5)


def test_leaves_of_objects_and_circles() -> None:
    class Node:
        def __init__(self) -> None:
            self.value, self.parent = torch.ones(2), self

    leaves = leaves_of({"a": [Node(), 0.5], "b": Result(ONE, ONE)})
    paths = {path for path, leaf in leaves if isinstance(leaf, Tensor)}
    assert paths == {"['a'][0].value", "['a'][1]", "['b'].logits", "['b'].features"}


def without_values(kind: str) -> nn.Module:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    model.add_module("head", nn.Linear(4, 10))
    if kind == "meta":
        return model.to("meta")
    model[2] = nn.Conv2d(4, 4, 3, device="meta") if kind == "partly meta" else nn.LazyConv2d(4, 3)
    return model


@pytest.mark.parametrize("kind", ["meta", "partly meta", "lazy"])
def test_weights_without_values_are_one_clear_error(kind: str, tmp_path: Path) -> None:
    parent = without_values("lazy").eval()
    parent(IMAGES)
    planned = recast.plan(parent, IMAGES, where="all")
    child = recast.recast_(copy.deepcopy(parent), planned)
    path = recast.save(child, tmp_path / "child.safetensors")
    data = load_data(DataConfig(num_val=20))
    for call in (
        lambda model: recast.recast_(model, planned),
        lambda model: recast.verify(model, child, IMAGES),
        lambda model: recast.load(path, parent=model),
        lambda model: evaluate(model, "clean", data),
        lambda model: recast.save(model, tmp_path / "other.safetensors"),
    ):
        with pytest.raises(RecastError, match=r"lazy layers|on the meta device"):
            call(without_values(kind).eval())
    assert not (tmp_path / "other.safetensors").exists()
