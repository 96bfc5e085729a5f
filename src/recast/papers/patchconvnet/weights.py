"""PatchConvNet's published weights: their names in ours, and from one class token to one a class.

The published layout is that of `patchconvnet_models.py` in facebookresearch/deit. It differs in names, and in the
per-class networks' head: C layers `head.j` of one output, where ours is one (C, d) weight and one (C) bias.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from timm.models import clean_state_dict
from torch import Tensor, nn

from recast.errors import RecastError

# (published, ours); * stands for the same in both. The first line that fits decides.
NAMES = (
    ("cls_token", "pool.cls_token"),
    ("norm.*", "pool.norm.*"),
    ("patch_embed.proj.*.0.weight", "stem.*.weight"),
    ("blocks.*.gamma_1", "blocks.*.ls.gamma"),
    ("blocks.*.norm1.*", "blocks.*.norm.*"),
    ("blocks.*.attn.qkv_pos.0.*", "blocks.*.conv1.*"),
    ("blocks.*.attn.qkv_pos.2.*", "blocks.*.conv_dw.*"),
    ("blocks.*.attn.qkv_pos.4.conv_reduce.*", "blocks.*.se.fc1.*"),
    ("blocks.*.attn.qkv_pos.4.conv_expand.*", "blocks.*.se.fc2.*"),
    ("blocks.*.attn.qkv_pos.5.*", "blocks.*.conv2.*"),
    ("blocks_token_only.0.gamma_*", "pool.ls*.gamma"),
    ("blocks_token_only.0.*", "pool.*"),
)
CLASS_HEAD = re.compile(r"head\.(\d+)\.(weight|bias)")
TOKENS = "pool.cls_token"


def renamed(name: str, pairs: Iterable[tuple[str, str]]) -> str:
    """Return the new name by the first pair (old, new) that matches, or the name itself."""
    for old, new in pairs:
        if match := re.fullmatch(re.escape(old).replace(r"\*", "(.+)"), name):
            same = iter(match.groups())
            return re.sub(r"\*", lambda _, same=same: next(same), new)  # type: ignore[misc]
    return name


def from_official(checkpoint: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return published weights, with one token or one per class, under our names; our own weights are unchanged.

    Raises RecastError if the head of a class is missing.
    """
    weights: Mapping[str, Tensor] = clean_state_dict(checkpoint.get("model", checkpoint))
    if not any(name.startswith("patch_embed.proj.") for name in weights):
        return dict(weights)
    heads = {name: value for name, value in weights.items() if CLASS_HEAD.fullmatch(name)}
    return {renamed(name, NAMES): value for name, value in weights.items() if name not in heads} | _joined(heads)


def _joined(heads: dict[str, Tensor]) -> dict[str, Tensor]:
    """Join `head.j.weight` (1, d), `head.j.bias` (1) of C classes to `head.weight` (C, d), `head.bias` (C)."""
    if not heads:
        return {}
    classes = 1 + max(int(name.split(".")[1]) for name in heads)
    names = {kind: [f"head.{j}.{kind}" for j in range(classes)] for kind in ("weight", "bias")}
    if missing := [name for name in (*names["weight"], *names["bias"]) if name not in heads]:
        raise RecastError(
            f"the checkpoint has heads of {classes} classes but {len(missing)} of their tensors are missing "
            f"(first: {missing[0]})"
        )
    return {f"head.{kind}": torch.cat([heads[name] for name in names[kind]]) for kind in names}


def checkpoint_filter_fn(state_dict: Mapping[str, Any], model: nn.Module) -> dict[str, Tensor]:
    """Return weights under our names for a PatchConvNet, from the published ones or ours.

    For a network with a token per class a single token is repeated, and class j has row j of the head. With
    `cls_in_keys=True` this computes the function of the single-token network. In the paper's form only the single token
    attends to its own key, so the logits differ: a short fine-tuning follows (section 3.1). Tokens of another number of
    classes are replaced by the model's new ones. The head is unchanged.
    """
    weights = from_official(state_dict)
    tokens, classes = weights.get(TOKENS), getattr(model.pool, "num_classes", None)
    if tokens is None or classes in (None, tokens.shape[1]):
        return weights
    new = tokens.repeat(1, classes, 1) if tokens.shape[1] == 1 else model.state_dict()[TOKENS]
    return weights | {TOKENS: new}
