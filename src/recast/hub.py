"""The Hugging Face Hub: `push_to_hub` writes a repository, `load("hf-hub:user/name")` reads it."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import nn

from recast.config import typed
from recast.errors import RecastError
from recast.files import write_text
from recast.io import HUB, HUB_FILE, load, save
from recast.models.build import check_constructor
from recast.models.sources import reaching
from recast.models.weights import read_header
from recast.surgery.plan import plan_of
from recast.surgery.proof import proof_of


@typed("subject", "repo", "license", "results", "private", "trust")
def push_to_hub(
    subject: nn.Module | str | Path,
    repo: str,
    *,
    constructor: str | dict[str, Any] | None = None,
    license: str | None = None,
    results: str = "",
    private: bool = False,
    trust: bool = False,
) -> str:
    """Upload a model to the Hugging Face Hub.

    The repository holds `model.safetensors` (the file of `save`) and, unless it has one, a model card: the recast
    layers, how to load it, the claims that `recast check` verifies, the parent and its licence. The token is that of
    `hf auth login` or HF_TOKEN.

    Args:
        subject: a model, a file of `save`, or a folder with `weights.safetensors`.
        repo: user/name.
        constructor: how to build the parent, as for `save`; required for a model.
        license: of the weights, for the card's metadata. Default: that of the parent's weights in timm.
        results: Markdown for the card.
        private: make the repository private.
        trust: call a `pkg.module:function` that a file names.

    Returns:
        The address.

    Raises:
        RecastError: for a file without a constructor, and where the Hub refuses.

    Example:
        >>> recast.push_to_hub("child.safetensors", "user/name")  # doctest: +SKIP
        'https://huggingface.co/user/name'
    """
    from huggingface_hub import HfApi

    with TemporaryDirectory() as name:
        folder = Path(name)
        if isinstance(subject, nn.Module):
            save(subject, folder / HUB_FILE, constructor)
        else:
            source = Path(subject) / "weights.safetensors" if Path(subject).is_dir() else Path(subject)
            read_header(source)
            shutil.copyfile(source, folder / HUB_FILE)
        made_by = read_header(folder / HUB_FILE)["constructor"]
        if made_by is None:
            raise RecastError("push_to_hub requires a constructor: pass the parent's name, constructor='resnet50'")
        model = load(folder / HUB_FILE, trust=trust or isinstance(subject, nn.Module))
        write_text(folder / "README.md", model_card(model, repo, made_by, license, results))
        with reaching(f"could not push to {repo}", "check the name, and hf auth login"):
            api = HfApi(library_name="recast")
            address = api.create_repo(repo, private=private, exist_ok=True)
            keeps = ["README.md"] if api.file_exists(repo, "README.md") else None
            api.upload_folder(repo_id=repo, folder_path=folder, ignore_patterns=keeps, commit_message="recast")
    return str(address)


def model_card(model: nn.Module, repo: str, made_by: dict[str, Any], license: str | None, results: str) -> str:
    """Return the text of README.md, from the file, `results` and timm alone."""
    from huggingface_hub import ModelCardData

    plan, proof = plan_of(model), proof_of(model)
    _, parent, _ = check_constructor(made_by)
    published = getattr(model, "pretrained_cfg", None)
    cfg = published if isinstance(published, Mapping) else {}
    data = ModelCardData(license=license or "unknown", library_name="recast", tags=["recast", "timm", "attention"])
    layers = [] if plan is None else [f"`{step.name or 'the model itself'}`" for step in plan.steps]
    trust = ", trust=True" if ":" in parent else ""
    theirs = f"of the parent's published weights, by timm: {cfg.get('license', 'unknown')}"
    lines = [
        f"---\n{data.to_yaml()}\n---\n", f"# {repo.rpartition('/')[2]}\n",
        f"`{parent}`, made with Recast (`pip install recast-vision`). Convolutions that became attention: "
        f"{', '.join(layers) or 'none'}.\n",
        "## Load\n", f'```python\nimport recast\n\nmodel = recast.load("{HUB}{repo}"{trust})\n```\n',
        "## Proof\n", f"`recast check {HUB}{repo} --parent PARENT` verifies what the file says of itself.\n",
        f"- Fingerprint of the parent: `{proof.parent}`",
        f"- Compared with its parent before training: {proof.verified or 'not recorded'}\n",
        results, "## Licence\n", license or theirs, "",
    ]  # fmt: skip
    return "\n".join(lines)
