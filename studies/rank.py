"""Does the ranking of layers on images (`recast.rank`) predict where attention pays? Several seeds.

On PYTHONPATH: benchmarks/.

    python studies/rank.py digits --out runs/rank                       # digits_resnet on scikit-learn's digits
    python studies/rank.py odd_digit --out runs/rank --epochs 5         # the quickstart's question
    RECAST_DATA=DIR python studies/rank.py cifar20 --out runs/rank      # CIFAR-100 ResNet-20 → CIFAR-10; hours
    RECAST_DATA=DIR python studies/rank.py cifar56 --out runs/rank --epochs 6 --amp bf16   # the same of ResNet-56
    python studies/rank.py digits --out runs/rank --collect             # only the table

A parent is trained first (`cifar`: the trained network with a new head, on 4,000 images; `odd_digit`: the quickstart's,
which reads one digit and has not seen the question). Its layers are ranked on 512 of the training images. Every arm
then trains the parent on in the same way, and differs in the layers recast:

    none            no layer: the control arm
    last            from the end of the network, up to half of the multiply-adds that the last stage adds (--share)
    auto            those that promise most per multiply-add, up to the same multiply-adds
    least           the same with the ranking upside down
    random          layers in random order, up to the same multiply-adds
    stage           the whole last stage
    all             every layer within 1,024 tokens, at whatever cost
    only LAYER      one layer (--each): does what a layer promises agree with what it brings?

rank_STUDY.csv: arm, seed, metric, value: loss and top1 on the validation images, train_loss, macs, layers, heads awake;
promised, of the layers of `only`; and for each seed the rank correlation (Spearman) of promised with the fall of the
validation loss against `none` over the layers. A run that is finished is left alone, one that was cut off goes on.
"""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import replace
from pathlib import Path

import torch
from scipy.stats import spearmanr
from timing import RESULTS, write_table

from recast.analysis.records import Wakefulness
from recast.lab.config import AugmentConfig, DataConfig, OptimConfig, Recipe
from recast.lab.data import load_data
from recast.lab.data.sources import labelled_images
from recast.lab.experimental.ranking import Ranking, rank
from recast.lab.recipe import load_recipe
from recast.lab.recipes import make_recipe
from recast.lab.training.run import train
from recast.layers.config import RecastConfig
from recast.models.build import build
from recast.models.config import ModelConfig
from recast.surgery.plan import Plan
from recast.surgery.planning import plan

IMAGES = 512


def base(options: argparse.Namespace, seed: int) -> Recipe:
    """What all arms share."""
    shared = Recipe(
        where=["none"], recast=RecastConfig(query_key="images"), epochs=options.epochs, control=False, seed=seed,
        keep=1, device=options.device, amp=options.amp,
    )  # fmt: skip
    if options.study == "digits":
        data = DataConfig("digits", batch_size=50, img_size=16)
        return replace(shared, model=ModelConfig("digits_resnet"), data=data, optim=OptimConfig(lr=1e-3, gate_lr=1e-2))
    if options.study == "odd_digit":
        own = make_recipe("odd_digit")
        return replace(shared, model=own.model, data=own.data, optim=own.optim, recast=own.recast)
    root, name = Path(os.environ["RECAST_DATA"]), options.study.replace("cifar", "resnet")
    weights = str(root / "weights" / f"cifar100_{name}_chenyaofo.safetensors")
    return replace(
        shared,
        model=ModelConfig(f"cifar_{name}", weights, new_head=True, num_classes=10),
        data=DataConfig("cifar10", data_dir=str(root / "cifar10"), num_train=4000, num_val=2000, batch_size=100),
        augment=AugmentConfig(crop="pad"),
        optim=OptimConfig(lr=1e-3, gate_lr=1e-2),
    )


def parent_of(options: argparse.Namespace, seed: int) -> Recipe:
    """The recipe that goes on from the seed's parent, which is trained here where it is not."""
    recipe, out = base(options, seed), options.out / f"{options.study}-parent-{seed}"
    if not (out / "weights.safetensors").is_file():
        first = recipe
        if options.study == "odd_digit":
            one, optim = replace(recipe.data, name="one_digit"), OptimConfig(lr=2e-3, min_lr=1e-5)
            first = replace(recipe, data=one, optim=optim, epochs=3)
        train(first, out, resume=(out / "recipe.yaml").is_file())
    weights = str(out / "weights.safetensors")
    return replace(recipe, model=replace(recipe.model, checkpoint=weights, new_head=False, num_classes=10))


def ranking_of(recipe: Recipe) -> tuple[Ranking, Plan, Plan, list[str]]:
    """The ranking of all layers, the plans of all layers and of the last stage, and the layers in a random order."""
    data = load_data(recipe.data)
    model = build(recipe.model, num_classes=len(data.classes))
    images, labels = labelled_images(data, IMAGES, recipe.seed, "stop", torch.device("cpu"))
    every = plan(model, images[:1], recipe.recast, where="all")
    last = plan(model, images[:1], recipe.recast)
    found = rank(model, every, images, labels, timed=False)
    names = [step.name for step in every.steps]
    mixed = torch.randperm(len(names), generator=torch.Generator().manual_seed(recipe.seed)).tolist()
    return found, every, last, [names[i] for i in mixed]


def within(order: list[str], every: Plan, limit: float) -> list[str]:
    """Layers in this order while they add no more than `limit` multiply-adds."""
    added = {step.name: step.after.macs - step.before.macs for step in every.steps}
    taken = []
    for name in order:
        if added[name] <= limit:
            taken.append(name)
            limit -= added[name]
    return taken


def arms(
    options: argparse.Namespace, found: Ranking, every: Plan, last: Plan, mixed: list[str]
) -> dict[str, list[str]]:
    """Layers by arm, in the order in which they are run."""
    by_cost = [layer.name for layer in found.layers]
    names = [step.name for step in every.steps]
    limit = options.share * (last.after.macs - last.before.macs)
    chosen = {
        "none": ["none"],
        "last": within(names[::-1], every, limit),
        "auto": within(found.order("macs"), every, limit) or ["none"],
        "least": within(by_cost[::-1], every, limit),
        "random": within(mixed, every, limit),
        "stage": [step.name for step in last.steps],
        "all": names,
    }
    return chosen | ({f"only {name}": [name] for name in by_cost} if options.each else {})


def main() -> None:
    """Train, and collect."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("study", choices=["digits", "odd_digit", "cifar20", "cifar56"])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--share", type=float, default=0.5, help="of what the last stage adds")
    parser.add_argument("--arms", nargs="+", help="only these arms")
    parser.add_argument("--each", action="store_true", help="also every layer by itself")
    parser.add_argument("--amp", choices=["off", "bf16"], default="off", help="precision of all training")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--collect", action="store_true", help="only write the table")
    options = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    table: list[list[object]] = []
    for seed in options.seeds:
        recipe = parent_of(options, seed)
        found, every, last, mixed = ranking_of(recipe)
        promised = {layer.name: layer.promised for layer in found.layers}
        fall: dict[str, float] = {}
        for arm, layers in arms(options, found, every, last, mixed).items():
            out = options.out / f"{options.study}-{arm.replace(' ', '-')}-{seed}"
            if not options.collect and (options.arms is None or arm in options.arms):
                print(out, " ".join(layers), flush=True)
                if not (out / "weights.safetensors").is_file():
                    chosen = replace(recipe, where=layers, budget="tokens=none")
                    train(chosen, out, resume=(out / "recipe.yaml").is_file())
            if not (out / "weights.safetensors").is_file():
                continue
            stored = load_recipe(out / "recipe.yaml")
            if (stored.where, stored.epochs, stored.amp) != (layers, options.epochs, options.amp):
                raise SystemExit(f"{out} holds a run of other layers, epochs or precision: choose another --out")
            line = json.loads((out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[-1])
            macs = every.before.macs + sum(s.after.macs - s.before.macs for s in every.steps if s.name in layers)
            values = {"loss": line["val_loss"], "top1": line["val_top1"], "train_loss": line["train_loss"]}
            table += [[arm, seed, metric, f"{value:.6g}"] for metric, value in {**values, "macs": macs}.items()]
            table.append([arm, seed, "layers", " ".join(layers)])
            if (attention := Wakefulness.of(line["layers"])) is not None:
                table.append([arm, seed, "heads awake", f"{attention.awake} of {attention.heads}"])
            fall[arm] = -line["val_loss"]
            if arm.startswith("only "):
                table.append([arm, seed, "promised", f"{promised[layers[0]]:.6g}"])
        if "none" in fall and len(single := [arm for arm in fall if arm.startswith("only ")]) > 2:
            falls = [fall[arm] - fall["none"] for arm in single]
            agreement = spearmanr([promised[arm.removeprefix("only ")] for arm in single], falls).statistic
            table.append(["only", seed, "spearman", f"{agreement:.3f}"])
    write_table(RESULTS / f"rank_{options.study}.csv", ["arm", "seed", "metric", "value"], table)


if __name__ == "__main__":
    main()
