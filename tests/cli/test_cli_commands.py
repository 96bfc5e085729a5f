import re
import subprocess
import sys
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import recast.lab.training.run as training
from recast.errors import RecastError
from recast.lab.cli import COMMANDS
from recast.lab.cli.guard import one_line
from recast.lab.config import Recipe

Cli = Callable[..., Any]
Refused = Callable[..., str]


@pytest.fixture
def trained(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Recipe]:
    train = mock.Mock()
    monkeypatch.setattr(training, "train", train)

    def call(*words: str | Path) -> Recipe:
        done = cli("train", *words, "--json")
        assert done.code == 0, done.err
        return train.call_args.args[0]

    return call


@pytest.mark.parametrize("command", COMMANDS)
def test_help(command: str, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "110")
    short, everything = cli(command, "--help"), cli(command, "--help-all")
    for done in (short, everything):
        assert (done.code, done.err) == (0, "")
        assert done.out.startswith(f"Usage: recast {command} ")
        names = re.findall(r"^  (--\S+)", done.out, flags=re.MULTILINE)
        assert len(names) == len(set(names))
        assert "--json" in names
    assert everything.out.count("\n  --") >= short.out.count("\n  --")
    assert "--verbose" in everything.out
    assert f"recast {command}" in short.out[short.out.index("Examples:") :]
    assert cli("help", command).out == short.out


def test_the_usage_names_every_command(cli: Cli) -> None:
    for words in ([], ["--help"], ["help"]):
        done = cli(*words)
        assert done.code == 0
        assert all(f"  {name} " in done.out for name in COMMANDS)
    assert re.fullmatch(r"recast \d+\.\d+\S*\n", cli("--version").out)


def test_a_recipe_s_help_has_its_values(cli: Cli) -> None:
    assert re.search(r"--stride .*\[remove\]", " ".join(cli("train", "tcnn", "--help").out.split()))
    assert "d'Ascoli" in cli("train", "tcnn", "--help").out
    assert cli("train", "no_recipe", "--help").code == 2


def test_help_imports_no_torch() -> None:
    code = (
        "import sys, recast.papers; from recast.lab.cli import main\n"
        f"for name in {list(COMMANDS)}: main([name, '--help'])\n"
        "print([m for m in ('torch', 'timm', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, encoding="utf-8")
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("words", "key", "value"),
    [
        ("--batch-size 8", "data.batch_size", 8),
        ("--weight_decay 0.1", "optim.weight_decay", 0.1),
        ("--optim.lr=1e-3", "optim.lr", 1e-3),
        ("--pretrained", "model.pretrained", True),
        ("--no-control", "control", False),
        ("--where a b --seed 1", "where", ["a", "b"]),
        ("--where a,b", "where", ["a", "b"]),
        ("--schedule listed --dates 3:a.* 5:b", "schedule.dates", ["3:a.*", "5:b"]),
        ("--gate linear --content-heads 0,4,8", "recast.content_heads", (0, 4, 8)),
        ("--clip-grad null", "optim.clip_grad", None),
        ("--betas 0.9 0.999", "optim.betas", (0.9, 0.999)),
        ("--gate sigmoid --lambda-init 2", "recast.lambda_init", 2.0),
        ("--teacher parent --temperature 2", "task.teacher.targets.temperature", 2.0),
        ("--data scenes --resize 0.7 1.5", "task.resize", (0.7, 1.5)),
        ("--task embed --projector dino --dim 100", "task.projector.dim", 100),
        ("--init-std 0.02", "papers.deit.init_std", 0.02),
    ],
)
def test_options(words: str, key: str, value: object, trained: Callable[..., Recipe]) -> None:
    recipe: Any = trained("digits", *words.split())
    if key.startswith("papers"):
        recipe, key = recipe.papers["deit"], key.rpartition(".")[2]
    assert attrgetter(key)(recipe) == value


@pytest.mark.parametrize(
    ("words", "names"),
    [
        ("plam", "plam, plan"),
        ("--verison", "--verison"),
        ("plan", "MODEL"),
        ("evaluate", "RUN, recast evaluate runs/mine"),
        ("plan digits_resnet more", "more"),
        ("verify digits_resnet --num-imges 3", "--num-imges, --num-images"),
        ("plan digits_resnet --img-size 0", "--img-size"),
        ("plan digits_resnet --gate linear --lambda-init 2", "--lambda-init, --gate, sigmoid"),
        ("verify digits_resnet --seed 1.5", "--seed, 1.5"),
        ("report", "RUN"),
        ("evaluate x --img-size 3", "--img-size, two files"),
        ("evaluate x --sizes 16", "--sizes, --suite resolution"),
        ("evaluate x --suite resolution --sizes 16y", "--sizes"),
        ("evaluate x --threads 0", "--threads, 1"),
        ("train", "--resume"),
        ("train nope", "nope"),
        ("train nowhere.yaml", "nowhere.yaml"),
        ("train bad.yaml", "bad.yaml, optim.learning_rate, lr"),
        ("train wrong.yaml", "wrong.yaml, optim.lr, fast"),
        ("train digits --lr abc", "--lr, abc"),
        ("train digits --leer 1", "--leer, --lr"),
        ("train digits --amp bf61", "--amp, bf61, bf16"),
        ("train digits --task embed --repeats 3", "--repeats, --task, embed"),
        ("train digits --resume runs/x", "--resume, RECIPE"),
        ("train --resume runs/x", "runs/x, no such folder"),
        ("train digits --resume x --out y", "--resume"),
        ("train run", "--resume run, run/recipe.yaml"),
        ("plan run/w.safetensors", "is a file, --checkpoint run/w.safetensors"),
        ("plan mynet.py:build", "mynet:build"),
        ("plan nets/mynet.py", "mynet:FUNCTION"),
    ],
)
def test_a_mistake_names_what_was_typed(
    words: str, names: str, refused: Refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.yaml").write_text("optim: {learning_rate: 1}\n", encoding="utf-8")
    (tmp_path / "wrong.yaml").write_text("optim: {lr: fast}\n", encoding="utf-8")
    (tmp_path / "run").mkdir()
    for name in ("recipe.yaml", "w.safetensors"):
        (tmp_path / "run" / name).touch()
    message = refused(*words.split())
    assert not [name for name in names.split(", ") if name not in message], message
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.yaml", "run", "wrong.yaml"]


def test_the_command_takes_a_number_of_threads(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers: list[int | None] = []
    monkeypatch.setattr("recast.lab.cli.command.use_threads", numbers.append)
    cli("plan", "digits_resnet", "--num-classes", "10", "--img-size", "16", "--threads", "3")
    cli("report", "nowhere")
    assert numbers == [3]


def test_a_field_has_its_path_as_a_name_too(trained: Callable[..., Recipe], refused: Refused) -> None:
    words = (
        "--model.name",
        "digits_resnet",
        "--data.name",
        "digits",
        "--task.kind",
        "classify",
        "--data.img-size",
        "16",
    )
    recipe = trained("digits", *words)
    assert (recipe.model.name, recipe.data.img_size) == ("digits_resnet", 16)
    assert "--model requires a value" in refused("train", "--model")


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("--wher", "where"),
        ("--image-size", "img-size"),
        ("--model.kwarg=x", "model.kwargs"),
        ("--max-macs", None),
        ("--budget", None),
        ("--lrate", None),
        ("--nonsense", None),
        ("-x", None),
    ],
)
def test_an_option_is_suggested_only_for_a_name_much_like_it(typed: str, meant: str | None, refused: Refused) -> None:
    message = refused("plan", "resnet18", typed, "3")
    assert typed.partition("=")[0] in message
    assert re.findall(r"mean --(\S+)\?", message) == [meant] * (meant is not None)


@pytest.mark.parametrize(
    ("message", "line"),
    [
        ("choose with checkpoint_key=NAME", "choose with --checkpoint-key NAME"),
        ("give weights, checkpoint=my net.pth", "give weights, --checkpoint my net.pth"),
        ("add trust=True and", "add --trust and"),
        ("pretrained=False, or pass allow_change=True", "--no-pretrained, or pass --allow-change"),
        ("there; use beside=convolution", "there; use --beside convolution"),
        ("here: use device=cpu or device=auto", "here: use --device cpu or --device auto"),
        (
            "runs/trust=True,lr=1/net.pth and pretrained=True,lr=1/",
            "runs/trust=True,lr=1/net.pth and pretrained=True,lr=1/",
        ),
        ("/runs/checkpoint=3/net.pth, trust=True.", "/runs/checkpoint=3/net.pth, --trust."),
        ("own_trust=True, checkpoint, {'pretrained': True}", "own_trust=True, checkpoint, {'pretrained': True}"),
    ],
)
def test_arguments_that_a_message_advises_are_shown_as_options(message: str, line: str) -> None:
    assert one_line(RecastError(message)) == line
