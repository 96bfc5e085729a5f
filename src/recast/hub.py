"""The Hugging Face Hub: `push_to_hub` writes a repository from a model or a file; `load("hf-hub:user/name")` and
timm read it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from timm.models import register_model
from timm.models._pretrained import filter_pretrained_cfg
from torch import nn

from recast.config import typed
from recast.errors import RecastError
from recast.files import write_text
from recast.io import HUB, HUB_FILE, load, local_file, save
from recast.models.build import build_from, check_constructor, replayed
from recast.models.names import IN_TIMM
from recast.models.sources import reaching
from recast.models.weights import read_header
from recast.surgery.plan import plan_of
from recast.surgery.proof import proof_of

UNKNOWN = "unknown: ask whoever trained the parent"


@typed("subject", "repo", "license", "results", "private", "trust")
def push_to_hub(
    subject: nn.Module | str | Path,
    repo: str,
    *,
    constructor: str | dict[str, Any] | None = None,
    license: str | None = None,
    results: str = "",
    private: bool = False,
    token: str | None = None,
    trust: bool = False,
) -> str:
    """Upload a model to the Hugging Face Hub.

    The repository holds `model.safetensors` (the file of `save`), `config.json` for timm, and, unless it has one, a
    model card: the recast layers, how to load it, the claims that `recast check` verifies, the parent and its licence.

    Args:
        subject: a model, a file of `save`, or a folder with `weights.safetensors`.
        repo: user/name.
        constructor: how to build the parent, as for `save`; required for a model.
        license: of the weights, for the card's metadata. Default: that of the parent's weights in timm.
        results: Markdown for the card (`recast.lab.report.results_of(run)` writes that of a run).
        private: make the repository private.
        token: of the Hub. Default: that of `hf auth login`.
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
        write_text(folder / "config.json", json.dumps(_config(model), indent=1, default=str) + "\n")
        write_text(folder / "README.md", model_card(model, repo, made_by, license, results))
        with reaching(f"could not push to {repo}", "check the name, and hf auth login"):
            api = HfApi(token=token, library_name="recast")
            address = api.create_repo(repo, private=private, exist_ok=True)
            keeps = ["README.md"] if api.file_exists(repo, "README.md") else None
            api.upload_folder(repo_id=repo, folder_path=folder, ignore_patterns=keeps, commit_message="recast")
    return str(address)


def _config(model: nn.Module) -> dict[str, Any]:
    """Return config.json for timm: the entry point that builds the network, and its images."""
    published = getattr(model, "pretrained_cfg", None)
    config = dict(published) if isinstance(published, Mapping) else {}
    config = filter_pretrained_cfg(config, remove_source=True, remove_null=True)
    config.pop("architecture", None)
    return {"architecture": IN_TIMM, "num_classes": getattr(model, "num_classes", None), "pretrained_cfg": config}


def model_card(model: nn.Module, repo: str, made_by: dict[str, Any], license: str | None, results: str) -> str:
    """Return the text of README.md, from the file, `results` and timm alone."""
    from huggingface_hub import ModelCardData

    plan, proof = plan_of(model), proof_of(model)
    _, parent, kwargs = check_constructor(made_by)
    published = getattr(model, "pretrained_cfg", None)
    cfg = published if isinstance(published, Mapping) else {}
    source = cfg.get("hf_hub_id") or cfg.get("url")
    data = ModelCardData(
        license=license or "unknown", library_name="timm", tags=["recast", "timm", "attention"],
        pipeline_tag="image-classification" if getattr(model, "num_classes", 0) else None,
    )  # fmt: skip
    layers = [] if plan is None else [step.name or "the model itself" for step in plan.steps]
    summary = f"`{parent}`" + (f" ({', '.join(f'{key}={value}' for key, value in kwargs.items())})" if kwargs else "")
    if layers:
        summary += (
            f", {len(layers)} of whose convolutions became attention ({', '.join(f'`{name}`' for name in layers)})"
        )
    if plan is not None and plan.pool is not None:
        summary += f", with attention pooling ({plan.pool.kind.replace('_', ' ')})"
    code = ", trust=True" if ":" in parent else ""
    lines = [
        f"---\n{data.to_yaml()}\n---\n", f"# {repo.rpartition('/')[2]}\n",
        f"{summary}, made with Recast (`pip install recast-vision`).\n",
        "## Load\n", f'```python\nimport recast\n\nmodel = recast.load("{HUB}{repo}"{code})\n```\n',
    ]  # fmt: skip
    if not code:
        lines.append(f'Or `timm.create_model("{HUB}{repo}", pretrained=True)` after `import recast`.\n')
    lines += ["## Proof\n", f"`recast check {HUB}{repo} --parent PARENT` verifies what the file says of itself.\n"]
    if proof.parent is not None:
        lines.append(f"- Fingerprint of the parent: `{proof.parent}`")
    if proof.verified is not None:
        lines.append(f"- Compared with its parent before training: {proof.verified}")
    if proof.folded:
        lines.append(f"- {sum(done.convolution for done in proof.folded)} of {len(proof.folded)} layers folded back")
    lines += ["", *([results] if results else []), "## Parent and licence\n"]
    tag = f"{cfg.get('architecture', parent)}.{cfg['tag']}" if cfg.get("tag") else parent
    lines.append(f"- Parent: `{tag}`" + (f" (its published weights: {source})" if source else ""))
    theirs = f"timm tells {cfg['license']} for those; of other weights, {UNKNOWN}" if cfg.get("license") else UNKNOWN
    return "\n".join([*lines, f"- Licence: {license or theirs}", ""])


def recast_hub(pretrained: bool = False, pretrained_cfg: Any = None, **kwargs: Any) -> nn.Module:
    """Build what `timm.create_model("hf-hub:user/name", pretrained=True)` asks for.

    timm has read the config of a repository or folder; the weights are random unless `pretrained`. Takes `num_classes`,
    for a new classifier, and nothing else.
    """
    cfg = pretrained_cfg if isinstance(pretrained_cfg, dict) else getattr(pretrained_cfg, "__dict__", {})
    repo, folder, classes = cfg.get("hf_hub_id"), cfg.get("file"), kwargs.pop("num_classes", None)
    if not repo and not folder:
        raise RecastError(f"{IN_TIMM} is in a repository: timm.create_model('hf-hub:user/name', pretrained=True)")
    if unknown := [name for name in kwargs if name not in ("cache_dir", "pretrained_cfg_overlay")]:
        raise RecastError(f"{IN_TIMM} takes num_classes alone, got {unknown[0]}: its plan says the rest")
    path = local_file(f"{HUB}{repo}" if repo else Path(str(folder)) / HUB_FILE)
    header = read_header(path)
    model = load(path) if pretrained else replayed(build_from(header["constructor"]), header, path)
    if classes is not None and classes != getattr(model, "num_classes", None):
        model.reset_classifier(classes)  # type: ignore[operator]
    return model


register_model(recast_hub)
