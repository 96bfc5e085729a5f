"""A user's mistake ends in exit code 2 and one line on standard error; nothing is left behind.

Commands run in a scratch folder that holds what `prepare` of `commands.py` lays out there: `weights.safetensors` of a
digits_resnet, `tiny.yaml`, a run of it in `run/`, `notes.txt`, `empty/` and a folder of images `images/`.
"""

import os
import re
import shutil
from pathlib import Path

import pytest
from commands import call, inside, prepare

SLOW = bool(os.environ.get("RECAST_SLOW"))
Case = tuple[str, dict[str, str]]
"""A command line, and files (name → text) that it needs."""

SMALL = "plan digits_resnet --img-size 16"
LINES = {
    # words that come first: words that are mistakes after them, one between two bars
    "": """
plans | plan | verify | train | evaluate | explain | report | quickstart now | plan digits_resne | plan timm:nothing
plan nowhere.module:net | plan torch.nn:Nothing | plan digits_resnet extra | plan digits_resnet --wher all
plan digits_resnet --img-size 16x | plan digits_resnet --img-size 0 | plan digits_resnet --img-size 16x16x16
plan cifar_resnet20 --checkpoint weights.safetensors | train --resume run --out x | train --resume empty
train --resume nowhere | evaluate nowhere | evaluate empty | evaluate run empty | report nowhere | report empty
report run run | quickstart --out notes.txt | quickstart --out run
quickstart --seed one | quickstart --epochs 1""",
    SMALL: """
--where layer9 | --where stage:7 | --where | --where none | --max-tokens 3 | --max-tokens 0
--num-classes ten | --num-classes 0 | --pretrained
--checkpoint nowhere.safetensors | --checkpoint notes.txt
--gate sigmoids | --gate sigmoid --gamma-init 0.5 | --lambda-init 2 | --alpha 0 | --alpha many | --head-dim 0
--gamma-init nan | --bias-init 10 | --gate bias --content linear
--gate bias --alpha 2 | --stride removed | --backend fastest | --recast gate=sigmoid | --pool double
--pool single --num-heads 7 | --pool single --init-values inf | --pool single --cls-in-keys | --pool.start papers
--json maybe""",
    "verify digits_resnet": """
--img-size 16 --num-images 0 | --img-size 16 --num-images 1000000000 | --img-size 16 --device banana
--img-size 16 --data-dir x | --img-size 16x24 --data digits | --data digts | --seed one | --img-size 16 --where none""",
    "train": """
fintune | nowhere.yaml | attention_pool --model digits_resnet | tiny.yaml --config tiny.yaml | tiny.yaml --out run
tiny.yaml --out notes.txt | tiny.yaml --optim x""",
    "evaluate run": """
--suite claen | --suite clean,pdg | --num-images 0 | --num-images 10000 | --eps -1 | --eps big | --steps 0
--seed -1 | --batch-size 0 | --neighbours 0 | --suite resolution --sizes 16x | --device banana""",
    "explain": """
nowhere_net images | run nowhere.png | run notes.txt | run val:100000 | run val:x | run empty | run --num-images 0
run images/a.png --pretrained | run images/a.png --classes notes.txt | run images/a.png --layer layer9
run images/a.png --out page.txt | run images/a.png --out nowhere/page.html | run images/a.png --out run
run images/a.png --out tiny.yaml | digits_resnet | digits_resnet images/a.png --mean 0.5
digits_resnet images/a.png --crop-pct 2 | digits_resnet images/a.png --std 0 0 0 | digits_resnet val:3
weights.safetensors images/a.png | run images/a.png --device banana""",
    "report run": "--out empty | --out nowhere/report.html | --out tiny.yaml | --figure x",
}
OPTIONS = """
--data digts | --data folder | --data folder --data-dir nowhere | --data folder --data-dir empty | --data cifar10
--data zip --data-dir notes.txt | --data torch/Nothing | --model digits_resne | --num-classes 3 | --opt adamwx
--num-classes 3 --new-head false | --where layer9 | --max-tokens 3 | --device banana | --amp fp8 | --gate linears
--lambda-init 2 | --batch-size 0 | --batch-size half | --batch-size 2.5 | --img-size 0 | --test-size 0
--num-train 0 | --num-val 0 | --num-train 5 | --num-train 100000 | --input-size 0 | --repeats 0 | --base-batch 0
--accumulate 0 | --accumulate 3 | --save-steps 0
--workers -1 | --recalibrate-bn -1 | --epochs -1 | --epochs few
--conv-epochs -1 | --color-jitter -1 | --mixup -0.1 | --cutmix nan | --lr -1 | --lr fast | --gate-lr -1 | --pool-lr -1
--weight-decay -1 | --warmup-epochs -1 | --warmup-lr -1 | --min-lr inf | --gate-l1 -1 | --layer-scale -1
--clip-grad 0 | --optim.eps 0 | --temperature 0 | --std 0 0 0
--mean 0.5 | --mean a b c | --erasing 2 | --mix-prob 2 | --teacher-weight 1.5
--label-smoothing 1 | --bce-threshold 1 | --drop-path 1 | --ema-decay 1 | --momentum 1 | --betas 0.9 1 | --betas 0.9
--layer-decay 0 | --crop-pct 0 | --scale 0 1 | --scale 1 0.5 | --val-fraction 1
--crop middle | --auto-augment randy | --loss mse | --drop-path-mode square | --freeze head
--freeze trunk | --targets medium | --bad-image ignore | --order random | --order first_first
--schedule someday | --schedule listed | --schedule listed --dates 1:layer9 | --schedule listed --dates 7:layer3.*
--schedule listed --dates soon:layer3.* | --schedule at_once --conv-epochs 5 | --conv-epochs 1 | --dates 1:layer3.*
--schedule progressive --where none | --schedule progressive --recalibrate-bn 8
--schedule listed --dates 1:layer3.* 2:layer3.0.*
--teacher parents | --teacher model --teacher-model nothing_like_it | --teacher parent --teacher-checkpoint nowhere.pth
--control maybe | --seed x | --checkpoint nowhere.safetensors | --checkpoint null --pretrained
--pool double | --pool per_class --num-heads 3 | --pool single --cls-in-keys
--mixup 0.8 --batch-size 15 --accumulate 5
--cutmix 1 --batch-size 20 --accumulate 4 | --loss bce --bce-threshold -1 | --nonsense 1 | --optim.lrr 1 | --lr
--flip perhaps | --layer-scale 0.1 | --loss bce --bce-threshold 0.95 --label-smoothing 0.1 | --bce-threshold 0.0
--auto-augment rand-mnine | --auto-augment 3a-m9 | --auto-augment augmix-w0
--teacher model --teacher-model resnet18 | --opt lion --eps 1e-6
"""
"""Options of `recast train tiny.yaml`, each a mistake."""

MODEL = "model: {name: digits_resnet}\n"
YAML = (
    "optim: {lrr: 1}", "optimizer: {lr: 1}", MODEL + "recast: {gates: sigmoid}", "- model\n- data", "just words", "",
    "model: {name: digits_resnet", "model: !!python/object/apply:os.getcwd []",
    "model: [digits_resnet]", MODEL + "where: {last: stage}", MODEL + "epochs: many",
    MODEL + "epochs: 2.5", MODEL + "epochs: true", "model: {name: 18}", MODEL + "control: maybe",
    MODEL + "augment: {scale: [0.1, 0.5, 1]}", MODEL + "optim: {betas: 0.9}", MODEL + "epochs: null",
    MODEL + "data: {mean: [a, b, c]}", MODEL + "recast: {gate: linear, lambda_init: 2}",
    MODEL + "pool: {kind: single, start: average, cls_in_keys: true}", MODEL + "optim: {lr: .nan}",
)  # fmt: skip


def cases() -> list[Case]:
    lines = [
        (f"{first} {rest}".strip(), {})
        for first, text in (*LINES.items(), ("train tiny.yaml --out new", OPTIONS))
        for rest in re.split(r" \| |\n", text.strip("\n"))
    ]
    return lines + [("train bad.yaml --out new", {"bad.yaml": text}) for text in YAML]


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scratch").resolve()
    prepare(folder)
    return folder


def fault(case: Case, folder: Path) -> str:
    """What is wrong with the answer to a mistaken command line; empty if nothing is."""
    line, files = case
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    before = sorted(folder.rglob("*"))
    with inside(folder):
        code, _, err = call(line)
    faults = []
    if code != 2 or err.count("\n") != 1 or "error: " not in err:
        faults.append(f"exit code {code}, standard error {err[:500]!r}")
    changed = set(folder.rglob("*")) ^ set(before)
    if line.startswith("evaluate"):  # suites that were measured before the refused one stay
        changed = {path for path in changed if folder / "run" not in path.parents}
    if changed:
        faults.append(f"files made or removed: {sorted(map(str, changed))[:5]}")
    for name in (*files, "new.csv", "new"):
        path = folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    return "; ".join(faults)


def test_a_mistake_is_one_line_and_exit_code_2(scratch: Path) -> None:
    faults = {f"recast {case[0]} {case[1] or ''}": fault(case, scratch) for case in cases()[:: 1 if SLOW else 4]}
    assert not {line: text for line, text in faults.items() if text}


def test_the_check_sees_a_command_that_succeeds(scratch: Path) -> None:
    assert "exit code 0" in fault(("plan digits_resnet --img-size 16", {}), scratch)
