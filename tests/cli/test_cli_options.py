from __future__ import annotations

from operator import attrgetter

import pytest

from recast.lab.cli.help import Command
from recast.lab.cli.options import options_of, parse
from recast.lab.cli.train import TrainOptions
from recast.lab.config import Recipe

TRAIN = Command("train", "RECIPE [options]", "", "")


def parsed(*words: str) -> TrainOptions:
    return parse(TRAIN, TrainOptions(), words)


@pytest.mark.parametrize(
    ("words", "key", "value"),
    [
        (["--batch-size", "8"], "data.batch_size", 8),
        (["--data.batch-size", "8"], "data.batch_size", 8),
        (["--optim.lr=1e-3"], "optim.lr", 1e-3),
        (["--model", "x"], "model.name", "x"),
        (["--pretrained"], "model.pretrained", True),
        (["--where", "a", "b"], "where", ["a", "b"]),
        (["--where", "a,b"], "where", ["a", "b"]),
        (["--dates", "3:a.*", "5:b", "--lr", "1"], "schedule.dates", ["3:a.*", "5:b"]),
        (["--where", '["a", "b"]'], "where", ["a", "b"]),
        (["--gate-range", "-0.5", "1"], "recast.gate_range", (-0.5, 1.0)),
        (["--clip-grad", "null"], "optim.clip_grad", None),
        (["--control", "no"], "control", False),
        (["--flip", "null"], "augment.flip", None),
        (["--epochs", "3", "finetune"], "recipe", "finetune"),
        (["--mean", "1", "2", "3", "finetune"], "recipe", "finetune"),
    ],
)
def test_the_short_forms(words: list[str], key: str, value: object) -> None:
    options = parsed(*words)
    found = options.recipe if key == "recipe" else attrgetter(key)(options.run)
    assert (found, type(found)) == (value, type(value))


def test_every_field_of_a_recipe_has_one_short_name() -> None:
    names = [option.short for option in options_of(Recipe())]
    assert len(names) == len(set(names)), "two fields of a recipe end in the same word: one has lost its short name"


def test_words_after_two_dashes_are_no_options() -> None:
    assert parsed("--", "--epochs").recipe == "--epochs"
