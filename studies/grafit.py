"""Fine classes of CIFAR-100 from its 20 coarse labels: cross-entropy, SNCA+, Grafit FC and Grafit over several seeds.

On PYTHONPATH: benchmarks/.

    RECAST_DATA=DIR python studies/grafit.py --out runs/grafit                  # the four arms, then the tables
    RECAST_DATA=DIR python studies/grafit.py --out runs/grafit --arms "Grafit, recast" Grafit     # further ones
    RECAST_DATA=DIR python studies/grafit.py --out runs/grafit-cifar10 --model cifar_resnet20_a --epochs 10 \\
        --lr 0.3 --checkpoint DIR/weights/cifar10_resnet20_akamaster.safetensors   # from trained weights
    RECAST_DATA=DIR python studies/grafit.py --out runs/rates --lr 0.2 --seeds 0 --held-out  # to choose settings
    RECAST_DATA=DIR python studies/grafit.py --out runs/grafit --collect        # only the tables
    python studies/grafit.py --memory                                           # the loss at the size of ImageNet

Needs $RECAST_DATA/cifar100/{train,test}.zip. A tenth of train.zip is held out (2,000 of 20,000 images); an arm trains
on the rest with coarse labels and is measured with fine ones: the database is what it trained on, the queries are the
test images (with --held-out those held out, so that no setting is chosen on test images). All arms are recipes with one
small network, one schedule, one number of updates and the same images in the same order; Grafit sees --views of each.
"ClusterFit+" needs the seed's CE: its features of the training images are put into --clusters clusters by k-means, and
a new network learns the clusters (33 images each in the paper). "parent" is what the others begin with, untrained.
"Grafit, recast" is Grafit from the same random weights, its last stage recast before training (exact start, queries and
keys from images). All train in bf16. A run that is finished, or whose rows stand in results/grafit.csv, is left alone;
one that was cut off goes on.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import resource
import time
from collections import defaultdict
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from sklearn.cluster import MiniBatchKMeans
from timing import RESULTS, machine, write, write_table
from torch.nn import functional as F

from recast.io import load
from recast.lab.config import AugmentConfig, DataConfig, Recipe
from recast.lab.config.evaluation import Options
from recast.lab.data import Data, Loader, load_data
from recast.lab.data.libraries import NORMS
from recast.lab.evaluation import evaluate
from recast.lab.evaluation.context import PixelModel
from recast.lab.evaluation.knn import features
from recast.lab.evaluation.run_folder import open_run
from recast.lab.recipes import make_recipe
from recast.lab.records import Row
from recast.lab.statistics import mean_interval
from recast.lab.training.loop import fit
from recast.lab.training.run import train
from recast.models.build import build
from recast.models.config import ModelConfig
from recast.papers.grafit.config import EmbedConfig
from recast.papers.grafit.loss import neighbour_loss

CLUSTERFIT, PARENT = "ClusterFit+", "parent"
ARMS = {
    "CE": "coarse_ce", "SNCA+": "snca_plus", "Grafit FC": "grafit_fc", "Grafit": "grafit",
    "CE + instance": "coarse_ce_instance", "Grafit, recast": "grafit", CLUSTERFIT: "coarse_ce", PARENT: "coarse_ce",
}  # fmt: skip
"""Arm → recipe. The first four are run unless others are named."""
METRICS = ("top1", "map", "map/conditioned", "map/oracle")


class Claim(NamedTuple):
    """A difference of two (arm, metric), the first minus the second, lies above `more_than` points."""

    says: str
    one: tuple[str, str]
    other: tuple[str, str]
    more_than: float = 0.0


CLAIMS = (
    Claim("Table 2.4: Grafit beats CE by more than 3 points of neighbours", ("Grafit", "top1"), ("CE", "top1"), 3.0),
    Claim("Table 2.4: Grafit beats CE by more than 8 points of mAP", ("Grafit", "map"), ("CE", "map"), 8.0),
    Claim("Table 2.7: both losses beat that of neighbours alone, mAP", ("Grafit", "map"), ("SNCA+", "map")),
    Claim("Table 2.7: CE beats the loss of neighbours alone, mAP", ("CE", "map"), ("SNCA+", "map")),
    *(
        Claim(f"Table 2.7: conditioning raises the mAP of {arm}", (arm, "map/conditioned"), (arm, "map"))
        for arm in ("CE", "SNCA+", "Grafit FC", "Grafit")
    ),
    Claim("Table 2.4: ClusterFit+ beats CE, neighbours", (CLUSTERFIT, "top1"), ("CE", "top1")),
    Claim("Table 2.4: CE beats ClusterFit+, mAP", ("CE", "map"), (CLUSTERFIT, "map")),
    Claim("ours: attention helps fine classes, neighbours", ("Grafit, recast", "top1"), ("Grafit", "top1")),
    Claim("ours: attention helps fine classes, mAP", ("Grafit, recast", "map"), ("Grafit", "map")),
)


def recipe_of(options: argparse.Namespace, arm: str, seed: int) -> Recipe:
    """The paper's recipe of an arm for a small network and 32 pixels."""
    recipe, (mean, std) = make_recipe(ARMS[arm]), NORMS["cifar100"]
    task = recipe.task
    if isinstance(task, EmbedConfig):
        views = options.views if task.projector.views > 1 else 1
        task = task.replace(projector=task.projector.replace(dim=128, hidden=512, views=views))
    if arm == "Grafit, recast":
        recipe = recipe.replace(where=["last_stage"], recast={"query_key": "images"}, control=False)
    return recipe.replace(
        model=ModelConfig(options.model, options.checkpoint, new_head=options.checkpoint is not None),
        data=DataConfig(
            "zip", str(Path(os.environ["RECAST_DATA"]) / "cifar100" / "train.zip"), mean=mean, std=std,
            batch_size=options.batch_size, num_train=options.num_train, workers=options.workers,
        ),
        augment=AugmentConfig(crop="random", scale=(0.3, 1.0)), papers={"grafit": {"labels": "coarse"}},
        task=task.replace(auto_augment="rand-m9-mstd0.5-inc1", erasing=0.25),
        optim=recipe.optim.replace(lr=options.lr, weight_decay=options.weight_decay),
        epochs=options.epochs, amp="bf16", channels_last=True, device=options.device, save_steps=100, seed=seed,
    )  # fmt: skip


def folder(options: argparse.Namespace, arm: str, seed: int) -> Path:
    return Path(options.out / f"{arm.lower().replace('+', 'plus').replace(',', '').replace(' ', '-')}-{seed}")


def learn_clusters(options: argparse.Namespace, seed: int) -> None:
    """A new network learns the clusters that k-means finds in the features of the seed's CE."""
    out = folder(options, CLUSTERFIT, seed)
    if (out / "weights.safetensors").is_file():
        return
    teacher = folder(options, "CE", seed)
    if not (teacher / "weights.safetensors").is_file():  # its rows may stand in the table, and its folder be gone
        train(recipe_of(options, "CE", seed), teacher, resume=(teacher / "recipe.yaml").is_file())
    run = open_run(teacher)
    recipe = recipe_of(options, CLUSTERFIT, seed)
    model = PixelModel(run.models["finetuned"], run.data.mean, run.data.std).eval()
    parts = (run.data.train.plain(), run.data.val)
    found = [
        torch.cat([F.normalize(features(model, x), dim=1) for x, _ in Loader(part, 500)]).numpy() for part in parts
    ]
    clusters = min(options.clusters, len(found[0]) // 4)
    means = MiniBatchKMeans(clusters, batch_size=4096, n_init=3, random_state=seed).fit(found[0])
    sets = zip((run.data.train, run.data.val), found, strict=True)
    relabelled = [part.relabelled(torch.from_numpy(means.predict(x)).long()) for part, x in sets]
    data = replace(
        run.data, train=relabelled[0], val=relabelled[1], classes=tuple(f"cluster {i}" for i in range(clusters))
    )
    torch.manual_seed(seed)
    fit(build(recipe.model, num_classes=clusters), data, recipe, out, resume=out.is_dir())


def queries(options: argparse.Namespace, recipe: Recipe) -> Data:
    """The training images of the arms with fine labels, and what is asked of them."""
    data = load_data(recipe.data, recipe.augmentation, recipe.labels.replace(labels="fine"))
    if options.held_out:
        return data
    root = str(Path(os.environ["RECAST_DATA"]) / "cifar100")
    test = load_data(DataConfig("cifar100", root, num_train=100, num_val=options.num_test))
    if test.classes != data.classes:
        raise SystemExit("train.zip and test.zip have other classes")
    return replace(data, val=test.val)


def measure(options: argparse.Namespace, arm: str, seed: int) -> None:
    """retrieval.json of a finished run: its rows on the test images, or on those held out."""
    out = folder(options, arm, seed)
    path = out / f"retrieval{'-held-out' if options.held_out else ''}.json"
    if path.is_file() or (arm != PARENT and not (out / "weights.safetensors").is_file()):
        return
    recipe = recipe_of(options, arm, seed)
    data = queries(options, recipe)
    if arm == PARENT:
        out.mkdir(parents=True, exist_ok=True)
        torch.manual_seed(seed)
        trained = build(recipe.model, num_classes=len(load_data(recipe.data).classes))
    elif arm == CLUSTERFIT:
        trained = load(out / "weights.safetensors")
    else:
        trained = open_run(out).models["finetuned" if recipe.is_plain else "recast"]
    rows = evaluate({arm: trained}, ["retrieval"], data, options=Options(labels="fine"), progress=False)
    if arm in (CLUSTERFIT, PARENT):  # a classifier of clusters, or a random one, says nothing of coarse classes
        rows = [row for row in rows if row.metric != "map/conditioned"]
    path.write_text(json.dumps([asdict(row) for row in rows], indent=1), encoding="utf-8")
    print(arm, seed, {row.metric: round(row.value, 2) for row in rows}, flush=True)


def between(
    values: dict[tuple[str, str], dict[int, float]], one: tuple[str, str], other: tuple[str, str]
) -> list[Any] | None:
    """Number of seeds, mean of the differences over them, its 95 % interval, and what that allows to say."""
    paired = [values[one][seed] - values[other][seed] for seed in values[one] if seed in values[other]]
    if len(paired) < 2:
        return None
    mean, low, high = mean_interval(paired)
    verdict = "higher" if low > 0 else "lower" if high < 0 else "no difference shown"
    return [len(paired), *(round(v, 3) for v in (mean, low, high)), verdict]


def start(options: argparse.Namespace) -> str:
    """What the networks of a comparison began with."""
    return Path(options.checkpoint).stem if options.checkpoint else "random"


def measured(options: argparse.Namespace) -> dict[tuple[str, str, int], list[list[Any]]]:
    """Rows of every start, arm and seed: these, metric, value, low, high, n; from the table, and from newer runs."""
    found: dict[tuple[str, str, int], list[list[Any]]] = defaultdict(list)
    table = options.results / "grafit.csv"
    if table.is_file():
        with table.open(encoding="utf-8", newline="") as file:
            for began, arm, seed, metric, value, *interval in list(csv.reader(file))[1:]:
                if seed != "mean":
                    found[began, arm, int(seed)].append([began, arm, int(seed), metric, float(value), *interval])
    for arm in ARMS:
        for seed in options.seeds:
            path = folder(options, arm, seed) / "retrieval.json"
            if path.is_file():
                rows = [Row(**row) for row in json.loads(path.read_text(encoding="utf-8"))]
                key = (start(options), arm, seed)
                found[key] = [
                    [*key, row.metric, *(v and round(v, 3) for v in (row.value, row.low, row.high)), row.n]
                    for row in rows
                ]
    return found


def collect(options: argparse.Namespace) -> None:
    """Every number with its interval over the images; means over the seeds; differences from CE, by conditioning and by
    attention; what became of the claims."""
    rows = [row for _, found in sorted(measured(options).items(), key=lambda item: item[0][2]) for row in found]
    values: dict[str, dict[tuple[str, str], dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    for began, arm, seed, metric, value, *_ in rows:
        values[began][arm, metric][seed] = value
    differences, judged = [], []
    pairs = [((arm, metric), ("CE", metric)) for arm in ARMS if arm != "CE" for metric in METRICS]
    pairs += [((arm, metric), (arm, "map")) for arm in ARMS for metric in METRICS[2:]]
    pairs += [(("Grafit, recast", metric), ("Grafit", metric)) for metric in METRICS]
    for began, of_arms in values.items():
        for (arm, metric), by_seed in of_arms.items():
            if metric in METRICS and len(by_seed) > 1:
                interval = mean_interval(list(by_seed.values()))
                rows.append([began, arm, "mean", metric, *(round(v, 3) for v in interval), len(by_seed)])
        for one, other in pairs:
            if found := between(of_arms, one, other):
                differences.append([began, *one, *other, *found])
        for claim in CLAIMS:
            if found := between(of_arms, claim.one, claim.other):
                low, high = found[2:4]
                verdict = "does not hold" if high < claim.more_than else "not decidable"
                verdict = "holds" if low > claim.more_than else verdict
                judged.append([began, claim.says, claim.more_than, *found[:4], verdict])
    head = ["start", "arm", "seed", "metric", "value", "low_95", "high_95", "images_or_seeds"]
    write_table(options.results / "grafit.csv", head, rows)
    head = ["start", "arm", "metric", "against", "its_metric", "seeds", "difference", "low_95", "high_95", "verdict"]
    write_table(options.results / "grafit_differences.csv", head, differences)
    head = ["start", "claim", "more_than", "seeds", "difference", "low_95", "high_95", "verdict"]
    write_table(options.results / "grafit_claims.csv", head, judged)


def memory(options: argparse.Namespace) -> None:
    """The loss of neighbours forward and backward over as many images as ImageNet has: seconds and peak memory."""
    images, width, batch, classes = 1_281_167, 256, 512, 127
    generator = torch.Generator().manual_seed(0)
    remembered = torch.randn(images, width, generator=generator)
    remembered /= remembered.norm(dim=1, keepdim=True)
    labels = torch.randint(0, classes, (images,), generator=generator)
    indices = torch.randint(0, images, (batch,), generator=generator)
    z = F.normalize(torch.randn(batch, width, generator=generator), dim=1).requires_grad_()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.process_time()
    neighbour_loss(z, indices, remembered, labels, 0.05).mean().backward()
    assert z.grad is not None
    assert z.grad.isfinite().all()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    row = {
        "images": images, "dim": width, "batch": batch, "cpu_seconds": round(time.process_time() - started, 1),
        "memory_mib": round(4 * images * width / 2**20), "peak_before_mib": before >> 10, "peak_mib": peak >> 10,
        "machine": machine(),
    }  # fmt: skip
    write(options.results / "grafit_memory.csv", [row])


def main() -> None:
    """Train, measure, collect."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/grafit"))
    parser.add_argument("--results", type=Path, default=RESULTS, help="where tables go")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS)[:4])
    parser.add_argument("--model", default="cifar_resnet20")
    parser.add_argument("--checkpoint", help="start from these weights, with a new head; default: random ones")
    parser.add_argument("--epochs", type=int, default=22)
    parser.add_argument("--views", type=int, default=2, help="of Grafit; the paper: 8")
    parser.add_argument("--clusters", type=int, default=540, help="of ClusterFit+; the paper: 1,500 of 50,000 images")
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--lr", type=float, default=0.1, help="for 256 images, scales with the batch")
    parser.add_argument("--weight-decay", type=float, default=5e-4)
    parser.add_argument("--num-train", type=int, help="fewer images: a rehearsal")
    parser.add_argument("--num-test", type=int, help="fewer test images: a rehearsal")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--held-out", action="store_true", help="measure on held-out training images, no tables")
    parser.add_argument("--collect", action="store_true", help="only write the tables")
    parser.add_argument("--memory", action="store_true", help="only the loss at the size of ImageNet")
    options = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    if options.memory:
        return memory(options)
    done = () if options.held_out else measured(options)
    for seed in () if options.collect else options.seeds:
        for arm in options.arms:
            if (start(options), arm, seed) in done:
                continue
            out = folder(options, arm, seed)
            print(out, flush=True)
            if arm == CLUSTERFIT:
                learn_clusters(options, seed)
            elif arm != PARENT:
                train(recipe_of(options, arm, seed), out, resume=(out / "recipe.yaml").is_file())
            measure(options, arm, seed)
    return None if options.held_out else collect(options)


if __name__ == "__main__":
    main()
