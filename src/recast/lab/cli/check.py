"""`recast check FILE|RUN`: verify again what a saved file says of itself."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from recast.config import FilePath
from recast.errors import RecastError
from recast.lab.cli.command import Command, Compute, print_json
from recast.models.config import ModelConfig
from recast.models.trust import trusting

if TYPE_CHECKING:
    from torch import nn

EXAMPLES = """  recast check child.safetensors
  recast check child.safetensors --parent resnet50            (its published weights)
  recast check child.safetensors --parent mynet:build --checkpoint parent.pth
  recast check runs/mine --json                               (with the run's own parent)
"""


def check(
    saved: str,
    /,
    *,
    parent: str | None = None,
    checkpoint: FilePath | None = None,
    checkpoint_key: str | None = None,
    trust: bool = False,
    output: Compute,
) -> int:
    """Open a file of recast.save, rebuild its network and verify what the file says: checksum, plan, folded layers,
    exported files that lie beside it. With the parent: that it is the one that was recast, that the plan computes the
    same function, and whether training has moved the weights since. What cannot be verified is named, with the reason.
    Exit code 1: something is not as the file says.

    Args:
        saved: A file of recast.save, or a run folder.
        parent: A model's name (published weights), or a file of recast.save. None: a run's own.
        checkpoint: Weights for the name of --parent, .safetensors or .pth.
        checkpoint_key: Which weights of a checkpoint with several, e.g. state_dict. None: as timm, EMA first.
        trust: Run the code (pkg.module:function) that the files name.
    """
    if checkpoint is not None and (parent is None or Path(parent).is_file()):
        raise RecastError("--checkpoint holds the weights of --parent: add --parent with the name of a network")
    path = Path(saved)
    folder = path if path.is_dir() else None

    from recast import checking
    from recast.models.weights import read_header

    path = path / "weights.safetensors" if folder else path
    header = read_header(path)
    with trusting(parent, trust=trust):
        if parent is not None:
            model: nn.Module | None = _named(parent, checkpoint, checkpoint_key, header["constructor"]).eval()
        else:
            model = None if folder is None else _of_run(folder)
        result = checking.check(path, model, trust=trust)
    print_json(result.to_dict()) if output.as_json else print(result)
    return 0 if result.ok else 1


COMMAND = Command(check, "FILE|RUN [options]", EXAMPLES)


def _named(
    name: str, checkpoint: str | None, checkpoint_key: str | None, constructor: dict[str, Any] | None
) -> nn.Module:
    """Build the parent that was typed, with as many classes as the file's own constructor gives that network."""
    from recast.lab.explain.open import open_model
    from recast.models.build import build, check_constructor
    from recast.models.names import split_name
    from recast.models.trust import is_function

    if Path(name).is_file():
        return open_model(ModelConfig(name))
    made = None if constructor is None else check_constructor(constructor)
    pretrained = checkpoint is None and not is_function(name)
    config = ModelConfig(name, checkpoint, pretrained=pretrained, checkpoint_key=checkpoint_key)
    return build(config, num_classes=made[2].get("num_classes") if made and made[:2] == split_name(name) else None)


def _of_run(folder: Path) -> nn.Module | None:
    """Return the parent of a run; None if nothing was recast or the task changed the network."""
    from recast.lab.evaluation.run_folder import check_run
    from recast.lab.recipe import load_recipe
    from recast.lab.tasks import task_of
    from recast.models.build import build
    from recast.models.trust import check_trusted

    check_run(folder)
    recipe = load_recipe(folder / "recipe.yaml", complete=True)
    if recipe.is_plain or not task_of(recipe).keeps_network:
        return None
    check_trusted(recipe.model.name)
    return build(recipe.model).eval()
