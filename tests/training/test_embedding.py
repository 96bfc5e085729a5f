import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from small import CLASSES, digits_recipe, small_child, small_data, small_fit, small_recipe
from torch import Tensor, nn
from torch.nn import functional as F

from recast.errors import RecastError
from recast.lab.config import AugmentConfig, DataConfig, Recipe, ScheduleConfig
from recast.lab.folder.run import RunFolder
from recast.lab.task import Setting
from recast.lab.training.metrics import read_metrics
from recast.lab.training.run import train
from recast.papers.grafit.config import EmbedConfig, Projector
from recast.papers.grafit.head import EmbeddingHead, add_embedding_, embedding_head, without_embedding
from recast.papers.grafit.loss import EmbeddingLoss, dino_loss, neighbour_loss, remember_, triplet_loss

SMALL = Projector("mlp", dim=5, hidden=7, views=3)


def slow_neighbour_loss(z: Tensor, indices: Tensor, memory: Tensor, labels: Tensor, sigma: float) -> Tensor:
    losses = []
    for vector, index in zip(z, indices.tolist(), strict=True):
        rest = torch.arange(len(memory)) != index
        p = (memory @ vector / sigma)[rest].softmax(0)
        same = labels[rest] == labels[index]
        losses.append(-p[same].sum().log() if same.any() else 0 * vector.sum())
    return torch.stack(losses)


def test_the_loss_of_neighbours_is_the_slow_formula_forward_and_backward() -> None:
    torch.manual_seed(0)
    memory, start = (F.normalize(torch.randn(count, 6, dtype=torch.float64), dim=1) for count in (50, 5))
    labels, indices = torch.randint(4, (50,)), torch.tensor([3, 7, 49, 0, 20])
    labels[7] = 9  # alone in its class
    results = []
    for loss in (neighbour_loss, slow_neighbour_loss):
        z = start.clone().requires_grad_()
        losses = loss(z, indices, memory, labels, 0.05)
        (losses * torch.arange(1.0, 6)).sum().backward()
        results.append((losses.detach(), z.grad))
    torch.testing.assert_close(results[0], results[1], rtol=1e-10, atol=1e-12)
    assert results[0][0][1] == 0
    assert not results[0][1][1].any()


def test_dino_s_loss_is_lightly_s() -> None:
    """Computed with lightly 1.6.0's DINOLoss in float64; 0.5·sin(a·j + b) by a flat index j from 1."""

    def filled(*shape: int, a: float, b: float) -> Tensor:
        return 0.5 * torch.sin(a * torch.arange(1, 1 + math.prod(shape), dtype=torch.float64) + b).view(shape)

    ours, theirs = filled(2, 3, 5, a=0.7, b=0.1), filled(2, 2, 5, a=1.3, b=0.4)
    loss = dino_loss(ours, theirs, 0.1 * filled(5, a=0.9, b=0.2), 0.04)
    assert loss.mean().item() == pytest.approx(3.7751366034808482, rel=1e-12)


def test_the_memory_is_the_mean_of_what_was_and_what_is_of_length_1() -> None:
    memory = torch.zeros(4, 2)
    remember_(memory, torch.tensor([2, 0, 2]), torch.tensor([(0.0, 1.0), (0.6, 0.8), (1.0, 0.0)]))
    torch.testing.assert_close(memory, torch.tensor([(0.6, 0.8), (0, 0), (0, 1), (0, 0)]))  # the first of the two
    remember_(memory, torch.tensor([2]), torch.tensor([(1.0, 0.0)]))
    torch.testing.assert_close(memory[2], torch.tensor([math.sqrt(0.5)] * 2))


def size_of(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("config", "parameters"), [(Projector("linear", dim=128), 23_770_304), (Projector("mlp"), 32_949_568)]
)
def test_parameters_are_those_of_the_paper(config: Any, parameters: int) -> None:
    """Table 8.2: 23.8 M and 32.9 M, trunk and projector, what is kept for the test."""
    with torch.device("meta"):
        model = add_embedding_(timm.create_model("resnet50", num_classes=20), config, 20)
    head: Any = embedding_head(model)
    assert size_of(model) - size_of(head.predictor) - size_of(head.classifier) == parameters
    assert size_of(without_embedding(model)) == 23_508_032 + 2048 * 20 + 20


def test_a_head_leaves_the_logits_alone_and_probes_without_a_gradient() -> None:
    plain = timm.create_model("resnet10t", num_classes=7).eval()
    images = torch.randn(2, 3, 32, 32)
    expected = plain(images)
    headed = add_embedding_(without_embedding(plain), SMALL, 7)
    assert headed(images).equal(expected)
    head: Any = embedding_head(headed.train())
    logits, projected, predicted = head(torch.randn(4, 512, requires_grad=True))
    assert (logits.shape, projected.shape, predicted.shape) == ((4, 7), (4, 5), (4, 5))
    for config, has in ((SMALL, False), (Projector("linear", label_weight=0.5), True)):
        features = torch.randn(4, 8, requires_grad=True)
        EmbeddingHead(nn.Linear(8, 3), config)(features)[0].sum().backward()
        assert (features.grad is not None) == has
    with pytest.raises(RecastError, match="one linear classifier, VisionTransformerDistilled has head and head_dist"):
        add_embedding_(timm.create_model("deit_tiny_distilled_patch16_224", num_classes=7), SMALL, 7)


def headed(config: Any = SMALL) -> nn.Module:
    torch.manual_seed(3)
    return add_embedding_(small_child(), config, CLASSES)


def state_of_loss(folder: Path) -> dict[str, Tensor]:
    return torch.load(RunFolder(folder).saved_states()[-1], weights_only=True)["loss"]


def test_training_goes_on_bit_for_bit(goes_on: Callable[..., nn.Module], tmp_path: Path) -> None:
    recipe = small_recipe(task=EmbedConfig(projector=SMALL), save_steps=1)
    goes_on(small_fit, headed, "update", 8, recipe=recipe)
    resumed, straight = (state_of_loss(tmp_path / folder) for folder in ("run", "straight"))
    assert resumed["memory"].equal(straight["memory"])
    torch.testing.assert_close(resumed["memory"].norm(dim=1), torch.ones(40))
    assert any("target" in name for name in resumed)


DINO = Projector("dino", dim=6, hidden=5, views=3)


def test_dino_learns_without_labels_and_goes_on_bit_for_bit(goes_on: Callable[..., nn.Module], tmp_path: Path) -> None:
    recipe = small_recipe(task=EmbedConfig(projector=DINO), save_steps=1)
    model = goes_on(small_fit, lambda: headed(DINO), "update", 8, recipe=recipe)
    head: Any = embedding_head(model)
    torch.testing.assert_close(head.predictor.last.weight.norm(dim=1), torch.ones(6))
    state = state_of_loss(tmp_path / "run")
    assert (len(state["memory"]), state["center"].shape) == (0, (6,))
    assert state["center"].any()
    data = small_data()
    relabelled = replace(data, train=data.train.relabelled(data.train.labels.roll(1)))
    small_fit(tmp_path / "relabelled", twin := headed(DINO), recipe, data=relabelled)
    for name, value in model.state_dict().items():
        assert value.equal(twin.state_dict()[name]) == (".classifier." not in name), name
    assert not model.state_dict()["0.weight"].equal(headed(DINO).state_dict()["0.weight"])


def loss_of(config: Any, model: nn.Module, steps: int = 1) -> Any:
    return EmbeddingLoss(config, small_data(), model, nn.CrossEntropyLoss(), Setting(steps, torch.device("cpu")))


def test_the_target_follows_without_a_gradient() -> None:
    model = headed()
    loss = loss_of(SMALL, model, 10)
    before = [p.clone() for p in loss.target.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    images, indices = torch.randn(6, 3, 8, 8), torch.tensor([4, 9])

    def update() -> None:
        loss(model.train()(images), images, indices).backward()
        optimizer.step()
        loss.after_step(model)

    loss.step = 10  # the end of the run: τ = 1
    update()
    assert all(p.grad is None for p in loss.target.parameters())
    assert all(p.equal(q) for p, q in zip(before, loss.target.parameters(), strict=True))
    loss.step, loss.config = 0, loss.config.replace(target_decay=0.0)
    update()
    assert all(p.equal(q) for p, q in zip(model.parameters(), loss.target.parameters(), strict=True))
    assert loss.memory.norm(dim=1).nonzero().flatten().tolist() == [4, 9]


def test_the_loss_is_the_weighted_sum_of_its_parts() -> None:
    torch.manual_seed(0)
    config = Projector("linear", dim=5, hidden=6, label_weight=2, knn_weight=3, instance_weight=4, views=2)
    model, data_labels = headed(config), small_data().train.labels
    loss = loss_of(config, model)
    loss.memory.copy_(F.normalize(torch.randn(40, 5), dim=1))
    images, indices = torch.randn(6, 3, 8, 8), torch.tensor([4, 9, 11])
    model.train()[3].eval()  # type: ignore[operator]  # dropout
    loss.target.module[3].eval()
    logits, projected, predicted = outputs = model(images)
    expected = 2 * F.cross_entropy(logits[[0, 2, 4]], data_labels[indices])
    first = F.normalize(projected[[0, 2, 4]], dim=1)
    expected += 3 * slow_neighbour_loss(first, indices, loss.memory, data_labels, 0.05).mean()
    pairs = [(0, 1), (1, 0), (2, 3), (3, 2), (4, 5), (5, 4)]
    cosines = [F.cosine_similarity(predicted[[a]], projected[[b]]) for a, b in pairs]
    torch.testing.assert_close(loss(outputs, images, indices), expected - 4 * torch.cat(cosines).mean())


@pytest.mark.parametrize(
    "weights",
    [
        {},
        {"instance_loss": "triplet"},
        {"instance_loss": "triplet", "knn_weight": 0},
        {"knn_weight": 0},
        {"instance_weight": 0},
        {"label_weight": 1},
    ],
    ids=str,
)
def test_every_parameter_of_the_head_gets_a_gradient(weights: dict[str, Any]) -> None:
    """DDP waits for the gradients of all parameters, and stops at the second update if one has none."""
    config = Projector("mlp", dim=5, hidden=6, views=2, **weights)
    model = headed(config).train()
    loss, images = loss_of(config, model), torch.randn(8, 3, 8, 8)
    loss(model(images), images, torch.tensor([4, 9, 11, 2])).backward()
    assert [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None] == []


def test_the_triplet_loss_pushes_other_images_away() -> None:
    torch.manual_seed(0)
    config = Projector("linear", dim=5, knn_weight=0, instance_weight=4, instance_loss="triplet", views=3)
    model = headed(config)
    loss = loss_of(config, model)
    assert loss.target is None
    images, indices = torch.randn(12, 3, 8, 8), torch.tensor([4, 9, 11, 2])
    outputs = model.train()(images)[0], torch.randn(12, 5), torch.randn(12, 5)
    g = F.normalize(outputs[1], dim=1).unflatten(0, (4, 3))
    triplets = [
        F.relu(0.2 + g[i, a] @ g[j, b] - g[i, a] @ g[i, b])
        for i in range(4)
        for j in range(4)
        for a in range(3)
        for b in range(3)
        if i != j and a != b
    ]
    assert 0 < sum(value > 0 for value in triplets) < len(triplets)
    torch.testing.assert_close(loss(outputs, images, indices), 4 * torch.stack(triplets).mean())
    assert triplet_loss(g[:1]).tolist() == [0.0]


@pytest.mark.parametrize(
    ("make", "fields", "message"),
    [
        (Recipe, {"task": {"kind": "embed", "mixup": 0.8}}, "task.mixup requires task.kind classify, got embed"),
        (Recipe, {"augment": AugmentConfig(repeats=2)}, "augment.repeats does not apply to task.kind embed"),
        (Recipe, {"schedule": ScheduleConfig("progressive")}, "schedule.kind does not apply"),
        (Recipe, {"regularization": {"freeze": "trunk"}, "where": ["none"]}, "regularization.freeze"),
        (Recipe, {"pool": "per_class"}, "pool.kind per_class does not apply"),
        (Projector, {"kind": "mlp", "views": 1}, "compares views of an image and requires views of 2 or more"),
        (Projector, {"kind": "mlp", "knn_weight": 0, "instance_weight": 0}, "both 0"),
        (Projector, {"kind": "mlp", "local_scale": (0.1, 0.2)}, "local_scale requires kind dino"),
        (Projector, {"kind": "dino", "knn_weight": 1}, "knn_weight requires kind linear or mlp"),
        (Projector, {"kind": "dino", "views": 1}, "views must be >= 2"),
        (Projector, {"kind": "dino", "local_scale": (0.4, 0.1)}, "local_scale must be .smallest, largest"),
    ],
)
def test_what_cannot_be_is_refused(make: Any, fields: dict[str, Any], message: str) -> None:
    embed = {"task": EmbedConfig(projector=SMALL)} if make is Recipe else {}
    with pytest.raises(RecastError, match=message):
        make(**{**embed, **fields})


def test_images_alone_in_their_class_are_counted_and_skipped(tmp_path: Path) -> None:
    data = DataConfig("digits", img_size=8, num_train=10, num_val=10, batch_size=10)
    config = Projector("linear", dim=4, views=1, instance_weight=0)
    recipe = digits_recipe(data=data, task=EmbedConfig(projector=config), where=["none"])
    with pytest.warns(UserWarning, match="10 of 10 training images are alone in their class: the loss of neighbours"):
        train(recipe, tmp_path / "run", progress=False)
    assert [row["train_loss"] for row in read_metrics(tmp_path / "run" / "metrics.jsonl")] == [None, 0.0, 0.0]
