from __future__ import annotations

from operator import attrgetter

import pytest

from recast.errors import RecastError
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
        (["--no-control"], "control", False),
        (["--where", "a", "b"], "where", ["a", "b"]),
        (["--where", "a,b"], "where", ["a", "b"]),
        (["--dates", "3:a.*", "5:b", "--lr", "1"], "schedule.dates", ["3:a.*", "5:b"]),
        (["--where", '["a", "b"]'], "where", ["a", "b"]),
        (["--gate-range", "-0.5", "1"], "recast.gate_range", (-0.5, 1.0)),
        (["--gate-range", "0,1"], "recast.gate_range", (0.0, 1.0)),
        (["--clip-grad", "null"], "optim.clip_grad", None),
        (["--amp", "off"], "amp", "off"),
        (["--control", "no"], "control", False),
        (["--flip"], "augment.flip", True),
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


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--epohs", "3"], r"unknown option --epohs\. Did you mean --epochs"),
        (["--optim.lrr", "3"], r"unknown option --optim\.lrr\. Did you mean --optim\.lr"),
        (["--no-epochs"], r"unknown option --no-epochs"),
        (["a", "b"], r"unexpected argument 'b'"),
        (["-x"], r"unexpected argument '-x'"),
        (["--where", "--json"], r"--where needs a value"),
        (["--optim.lr", "x"], r"--lr must be a number, got 'x'"),
        (["--gate", "sigmiod"], r"--gate must be one of linear, sigmoid, bias, got 'sigmiod'\. Did you mean sigmoid"),
        (["--trackers", "tensorbord"], r"each item one of tensorboard, wandb.*Did you mean tensorboard"),
    ],
)
def test_a_mistake_is_one_line_in_the_users_words(words: list[str], message: str) -> None:
    """`tests/frozen/errors.json` holds many more."""
    with pytest.raises(RecastError, match=message) as raised:
        parsed(*words)
    assert "\n" not in str(raised.value)
