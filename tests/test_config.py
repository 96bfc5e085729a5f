import copy
import pickle
from collections import Counter
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar, Literal

import pytest
import torch
from torch import nn

import recast
from recast import PoolConfig, RecastConfig, RecastError, Schedule
from recast.config import Count, checked, coerce, read, typed
from recast.lab.cli.command import Part, Typed
from recast.lab.config import OptimConfig, Recipe, ScheduleConfig, TaskConfig
from recast.lab.config.fields import fields_of, merge
from recast.lab.config.recipe import PaperConfig
from recast.lab.config.text import override
from recast.layers.config import BesideGate, BiasGate, LinearGate, SigmoidGate
from recast.layers.pool_config import AttentionPooling


def test_a_union_makes_the_kind_that_is_named() -> None:
    assert RecastConfig() == BesideGate()
    assert RecastConfig("sigmoid", lambda_init=2) == SigmoidGate(lambda_init=2.0)
    assert RecastConfig(gate="bias").bias_init == 20
    assert isinstance(PoolConfig("per_class"), AttentionPooling)
    assert not PoolConfig().is_on
    assert PoolConfig("single", start="paper").replace(kind="per_class").start == "paper"
    assert RecastConfig("sigmoid", alpha=2, head_dim=3).replace(gate="bias") == BiasGate(head_dim=3)
    for config in (RecastConfig("sigmoid"), Recipe(pool="single", recast="bias")):
        assert pickle.loads(pickle.dumps(config)) == copy.deepcopy(config) == config


@pytest.mark.parametrize(
    ("value", "heads"),
    [
        *[("all", "all"), (3, 3), ("3", 3), (["3"], 3), ("0, 4,8", (0, 4, 8)), ([8, 0], (0, 8))],
        *[(["4", "0"], (0, 4)), ("4,", (4,)), ((4,), (4,))],
    ],
)
def test_a_choice_of_heads(value: Any, heads: Any) -> None:
    assert RecastConfig("linear", content_heads=value).content_heads == heads


MISTAKES: list[tuple[Any, dict[str, Any], str]] = [
    (OptimConfig, {"lr": -1}, "lr must be >= 0, got -1"),
    (OptimConfig, {"lr": float("nan")}, "lr must be finite, got nan"),
    (OptimConfig, {"lr": "fast"}, "lr must be a number, got 'fast'"),
    (OptimConfig, {"lr": 1e300}, "lr must be <= 1000000000, got 1e+300"),
    (OptimConfig, {"betas": (0.9,)}, "betas must have 2 values, got (0.9,)"),
    (OptimConfig, {"betas": (0.9, 1.0)}, "betas must be < 1, got 1.0"),
    (OptimConfig, {"lr": True}, "lr must be a number, got 'True'"),
    (Recipe, {"epochs": True}, "epochs must be a whole number, got 'True'"),
    (OptimConfig, {"lrr": 1}, "unknown name lrr; did you mean lr, qk_lr?"),
    (Recipe, {"lr": 1}, "unknown name lr; did you mean optim.lr?"),
    (OptimConfig, {"lrr": 1, "opts": "sgd"}, "unknown name lrr; did you mean lr, qk_lr? Unknown too: opts"),
    (Recipe, {"data": {"num_train": 0}}, "data.num_train must be >= 1 or > 0, got 0"),
    (Recipe, {"recast": None}, "recast.gate must be one of beside, linear, sigmoid, bias, got None"),
    (
        Recipe,
        {"recast": {"gate": "sig"}},
        "recast.gate must be one of beside, linear, sigmoid, bias, got 'sig'. Did you mean sigmoid?",
    ),
    (Recipe, {"papers": {"deit": {"init_st": 1}}}, "unknown name papers.deit.init_st; did you mean papers.deit.init_s"),
    (RecastConfig, {"gate": "sigmoids"}, "gate must be one of beside, linear, sigmoid, bias, got 'sigmoids'"),
    (RecastConfig, {"gate": "sigmoid", "gamma_init": 0.1}, "gamma_init requires gate beside or linear, got sigmoid"),
    (RecastConfig, {"gate": "bias", "content": "linear"}, "content requires gate linear or sigmoid, got bias"),
    (RecastConfig, {"lambda_init": 2}, "lambda_init requires gate sigmoid, got beside"),
    (RecastConfig, {"lamda_init": 2}, "unknown name lamda_init; did you mean lambda_init, gamma_init?"),
    (RecastConfig, {"content_heads": 1}, "content_heads requires gate linear or sigmoid, got beside"),
    (LinearGate, {"content_heads": 0}, "content_heads must be 'all' or >= 1 or a list, got 0"),
    (LinearGate, {"gaussian_heads": 0}, "gaussian_heads must be"),
    (RecastConfig, {"head_dim": 2.5}, "head_dim must be a whole number, got 2.5"),
    (PoolConfig, {"kind": "max"}, "kind must be one of none, single, per_class, got 'max'"),
    (
        PoolConfig,
        {"kind": "single", "start": "papre"},
        "start must be one of average, paper, got 'papre'. Did you mean pap",
    ),
    (PoolConfig, {"start": "paper"}, "start requires kind single or per_class, got none"),
    (PoolConfig, {"kind": "single", "cls_in_keys": True}, "cls_in_keys moves the average by 1/(n+1) and requires"),
    (ScheduleConfig, {"kind": "listed"}, "dates is missing; kind listed requires it"),
    (TaskConfig, {"teacher": "model"}, "teacher.teacher_model is missing; teacher.kind model requires it"),
]


@pytest.mark.parametrize(("kind", "values", "message"), MISTAKES)
def test_a_mistake_is_one_line(kind: Any, values: dict[str, Any], message: str) -> None:
    with pytest.raises(RecastError) as error:
        kind(**values)
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)
    with pytest.raises(RecastError) as error:
        read(kind, values, "mine.yaml")
    assert str(error.value).startswith("mine.yaml: ")


def overridden(words: str) -> Recipe:
    """The default recipe with `"optim.lr=1 recast.gate=bias"`, as typed on the command line."""
    pairs = [word.partition("=") for word in words.split()]
    values = {tuple(name.split(".")): [value] if "," in value else value for name, _, value in pairs}
    typed_words = Typed(Part(Recipe), values)
    return override(Recipe(), typed_words.changes, typed_words.name)


CLASHES = """
augment.scale=0.5,0.2 | --scale must be (smallest, largest)
optim.gate_l1=1 recast.gate=sigmoid | --gate-l1 requires --gate beside or linear, got sigmoid
regularization.freeze=trunk | --freeze trunk requires --where none
regularization.freeze=all_but_batch_norm | --freeze all_but_batch_norm requires --where none
schedule.conv_epochs=1 | --conv-epochs requires --schedule at_once, got before
schedule.order=first_first | --order requires --schedule progressive, got before
schedule.dates=1:a | --dates requires --schedule listed, got before
schedule.kind=at_once schedule.conv_epochs=5 | --conv-epochs must be below --epochs (5), got 5
schedule.kind=listed schedule.dates=6:a | --dates must lie in epochs 1 to 5
schedule.kind=never | --schedule never requires --stride remove, and --gate linear
schedule.kind=at_once where=none | --schedule at_once requires layers, but --where is none
schedule.kind=at_once schedule.recalibrate_bn=9 | --recalibrate-bn requires --schedule before, got at_once
data.name=scenes task.mixup=1 | --mixup requires --task classify, got segment
data.name=coco task.erasing=1 | --erasing requires --task classify or multilabel or segment or embed, got detect
data.name=coco task.resize=2,1 | --resize must be (smallest, largest)
data.name=masks pool.kind=single | --pool does not apply to --task segment
data.name=scenes task.kind=classify | --data scenes requires --task segment, got classify
data.name=coco papers.grafit.labels=coarse | --labels coarse does not apply to --task detect
papers.grafit.rank=genus papers.grafit.coarse_file=x | --coarse-file and --rank both say
task.loss.kind=bce task.class_weights=balanced | --class-weights requires --loss ce
task.loss.bce_threshold=0 | --bce-threshold requires --loss bce, got ce
task.teacher.kind=parent task.teacher.targets.kind=hard task.teacher.targets.temperature=2 | --temperature requires
"""
FINE = """
schedule.recalibrate_bn=10 | optim.gate_l1=1 | regularization.freeze=trunk where=none | data.name=scenes
data.name=scenes task.resize=1,1 | schedule.kind=never recast.gate=linear recast.stride=remove
pool.kind=per_class | data.mean=data | recast.gate=linear recast.content_heads=0,4
recast.gate=bias recast.bias_init=10 schedule.kind=progressive | task.loss.kind=bce task.loss.bce_threshold=0
task.kind=embed pool.kind=single task.projector.kind=dino task.auto_augment=3a | data.num_train=0.1 | data.num_train=10
task.teacher.kind=model task.teacher.teacher_model=resnet18 task.teacher.targets.kind=hard
"""


@pytest.mark.parametrize("line", CLASHES.strip().splitlines())
def test_what_does_not_go_together_is_named_as_it_was_typed(line: str) -> None:
    words, _, message = line.partition(" | ")
    with pytest.raises(RecastError) as error:
        overridden(words)
    assert str(error.value).startswith(message)


@pytest.mark.parametrize("words", [words.strip() for line in FINE.strip().splitlines() for words in line.split(" | ")])
def test_what_goes_together(words: str) -> None:
    recipe = overridden(words)
    assert recipe != Recipe()
    assert read(Recipe, recipe.model_dump(mode="json")) == recipe


def test_another_kind_drops_what_it_has_not() -> None:
    base = Recipe(recast=RecastConfig("sigmoid", alpha=2, lambda_init=3), task={"mixup": 0.8, "label_smoothing": 0.1})
    assert override(base, {"recast": {"gate": "linear"}}).recast == RecastConfig("linear", alpha=2)
    segment = override(base, {"data": {"name": "scenes"}}).task
    assert (segment.kind, segment.label_smoothing) == ("segment", 0.1)
    pool = merge(Recipe, {"pool": "single"}, {"pool": {"start": "paper"}})["pool"]
    assert pool == {"kind": "single", "start": "paper"}
    with pytest.raises(RecastError, match="lambda_init requires"):
        override(base, {"recast": {"gate": "linear", "lambda_init": 3}})


def test_fields_are_few_and_those_of_a_paper_are_its_own() -> None:
    fields = {field.path: field for field in fields_of(Recipe)}
    sections = Counter(path[0] for path in fields)
    assert (len(fields), sections["task"]) == (130, 31)
    assert Counter(path[1] for path in fields if path[0] == "papers") == {"grafit": 3, "deit": 3}
    assert sum(path[:2] == ("task", "projector") for path in fields) == 12
    assert fields["recast", "lambda_init"].kinds == ("sigmoid",)
    assert fields["recast", "gate"].choices == ("beside", "linear", "sigmoid", "bias")
    assert all(field.info.description for field in fields.values())


def test_tasks_and_papers_add_their_own() -> None:
    class CountConfig(TaskConfig):
        kind: Literal["count"] = "count"
        huber: float = 1.0

    class TestPaper(PaperConfig):
        section: ClassVar[str] = "test"
        share: float = 0.5

    recipe = Recipe(task={"kind": "count", "huber": 2}, papers={"test": {"share": 1}})
    assert (recipe.task.huber, recipe.papers["test"].share) == (2.0, 1.0)
    with pytest.raises(RecastError, match=r"task\.mixup requires task\.kind classify, got count"):
        Recipe(task={"kind": "count", "mixup": 1})


def test_arguments_and_dataclasses_are_checked() -> None:
    @typed("model", "steps", "names")
    def call(model: nn.Module, steps: Count = 1, names: list[str] | None = None) -> Any:
        return steps

    @checked
    class Point:
        x: int

    assert (call(nn.Identity(), "3"), Point("3").x) == (3, 3)
    export, save, image = partial(recast.export, nn.Identity()), recast.save, torch.zeros(1, 3)
    for wrong, message in (
        (lambda: call(3), "model must be a network"),
        (lambda: call(nn.Identity(), 0), "steps must be >= 1, got 0"),
        (lambda: call(nn.Identity(), 1, "ab"), "names must be a list, got 'ab'"),
        (lambda: recast.Geometry((0, 3)), r"kernel\.0 must be >= 1, got 0"),
        (lambda: Point("a"), "x must be a whole number"),
        (lambda: coerce(tuple[int, int], "12", "y"), "y must be"),
        (lambda: coerce(int, [torch.zeros(1, 9)], "y"), r"^y must be a whole number, got a list of tensors$"),
        (lambda: export("c.onnx", image), r"^path must be a string or a path, got a tensor of shape \(1, 3\)$"),
        (lambda: save(nn.Identity(), "x.safetensors", nn.Conv2d), r"^constructor must be a name \(timm:NAME, .*got"),
        (lambda: save(nn.Identity(), "x.safetensors", mean=[1, 2]), "^img_size, mean and std belong.*give all three$"),
    ):
        with pytest.raises(RecastError, match=message):
            wrong()


def test_schedules_of_recipes() -> None:
    plan: Any = SimpleNamespace(steps=tuple(SimpleNamespace(name=f"blocks.{i}.mixer") for i in range(4)))
    assert ScheduleConfig().dated(plan, 10) is None
    assert ScheduleConfig("never").dated(plan, 10) is None
    assert ScheduleConfig("at_once", conv_epochs=3).dated(plan, 10) == Schedule.at_once(plan, 4)
    assert ScheduleConfig("progressive").dated(plan, 50) == Schedule.progressive(plan, 50)
    listed = ScheduleConfig("listed", dates=["2:blocks.3.mixer", "2:blocks.1.mixer"]).dated(plan, 10)
    assert listed.due(2) == ("blocks.1.mixer", "blocks.3.mixer")


@pytest.mark.parametrize("word", ["5", "five:blocks.0", "5:", "-1:x", "1.5:x", "9" * 5000 + ":x"])
def test_dates_as_words(word: str) -> None:
    assert ScheduleConfig("listed", dates=["5:a", "5:b", "6:c"]).by_epoch == {5: ["a", "b"], 6: ["c"]}
    for dates in ([word], []):
        with pytest.raises(RecastError, match="dates must"):
            ScheduleConfig("listed", dates=dates)
