"""From a trained network and a folder of images to a report, by the functions behind `recast train, evaluate, report`.

    python examples/folder_to_report.py photos --model resnet50 --pretrained --out runs/mine

photos holds CLASS/IMAGE, or train/ and val/ with these. The run folder gets the recast network, the fine-tuned one,
their scores and report.html. The same command continues an interrupted run.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from recast.lab.config.text import override
from recast.lab.evaluation.run_folder import evaluate_run
from recast.lab.recipes import make_recipe
from recast.lab.report import write_report
from recast.lab.training.run import train


def main() -> None:
    """Train, evaluate, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", help="folder of images")
    parser.add_argument("--model", default="resnet18", help="name of a timm network, or torchvision:NAME")
    parser.add_argument("--checkpoint", help="file with its weights")
    parser.add_argument("--pretrained", action="store_true", help="fetch its weights")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--img-size", type=int)
    parser.add_argument("--suites", nargs="+", default=["clean"], help="more: corruptions, fgsm, …")
    parser.add_argument("--out", type=Path, default=Path("runs/mine"))
    options = parser.parse_args()

    # a recipe is data: every field has a type, and is checked before anything is loaded
    recipe = override(
        make_recipe("folder"),
        {
            "model": {
                "name": options.model,
                "checkpoint": options.checkpoint,
                "pretrained": options.pretrained and not options.checkpoint,
            },
            "data": {"data_dir": options.data, "img_size": options.img_size, "batch_size": options.batch},
            "epochs": options.epochs,
        },
    )
    has_begun = (options.out / "recipe.yaml").is_file()
    train(recipe, options.out, resume=has_begun, say=print)  # recast, verified, fine-tuned; and the control arm

    results = evaluate_run(options.out, options.suites)  # all arms on the same images
    for row in results.rows:
        print(f"{row.model}: {row.metric} {row.value:.2f} ({row.suite}, {row.n} images)")
    for line in results.differences:
        if line.metric == "top1":
            print(f"{line.model} − {line.against}: {line.value:+.1f} ({line.low:.1f}, {line.high:.1f})")
    print(f"report: {write_report([options.out])}")


if __name__ == "__main__":
    main()
