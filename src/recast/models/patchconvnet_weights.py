"""PatchConvNet's published weights: their names in ours and back, and from one class token to one a class.

The published layout is that of `patchconvnet_models.py` in facebookresearch/deit. It differs in names, and in the
per-class networks' head: C layers `head.j` of one output, where ours is one (C, d) weight and one (C) bias.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from recast.errors import RecastError

__all__ = ["from_official", "to_official", "to_per_class"]

# (published, ours); * stands for the same in both. The first line that fits decides, in both directions.
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


def _renames(pairs: list[tuple[str, str]]) -> list[tuple[re.Pattern[str], str]]:
    return [(re.compile(re.escape(a).replace(r"\*", "(.+)")), _with_groups(b)) for a, b in pairs]


def _with_groups(template: str) -> str:
    first, *rest = template.split("*")
    return first + "".join(rf"\g<{i}>{text}" for i, text in enumerate(rest, 1))


TO_OURS = _renames([(published, ours) for published, ours in NAMES])
TO_PUBLISHED = _renames([(ours, published) for published, ours in NAMES])


def _rename(name: str, renames: list[tuple[re.Pattern[str], str]]) -> str:
    """A name that no line fits stays as it is: whoever loads the weights says that it is unexpected."""
    for pattern, template in renames:
        if match := pattern.fullmatch(name):
            return match.expand(template)
    return name


def is_official(weights: Mapping[str, Any]) -> bool:
    """Whether the names are the published ones."""
    return any(name.startswith("patch_embed.proj.") for name in weights)


def from_official(checkpoint: Mapping[str, Any]) -> dict[str, Tensor]:
    """Published weights, one token or one a class, under our names; weights under our names come back as they are.

    `checkpoint` may nest them below "model", and DataParallel's `module.` may precede every name.
    Raises RecastError if a class's head is absent.
    """
    nested = checkpoint.get("model")
    weights: Mapping[str, Any] = nested if isinstance(nested, Mapping) else checkpoint
    if weights and all(name.startswith("module.") for name in weights):
        weights = {name.removeprefix("module."): value for name, value in weights.items()}
    if not is_official(weights):
        return dict(weights)
    found = {_rename(name, TO_OURS): value for name, value in weights.items() if not CLASS_HEAD.fullmatch(name)}
    return found | _join_heads({name: value for name, value in weights.items() if CLASS_HEAD.fullmatch(name)})


def _join_heads(heads: dict[str, Tensor]) -> dict[str, Tensor]:
    """`head.j.weight` (1, d), `head.j.bias` (1) of classes j = 0 … C − 1 to `head.weight` (C, d), `head.bias` (C)."""
    if not heads:
        return {}
    classes = 1 + max(int(name.split(".")[1]) for name in heads)
    wanted = {kind: [f"head.{j}.{kind}" for j in range(classes)] for kind in ("weight", "bias")}
    if absent := [name for names in wanted.values() for name in names if name not in heads]:
        raise RecastError(
            f"the checkpoint has heads of {classes} classes but {len(absent)} of their tensors are absent "
            f"(first: {absent[0]}): it is not whole"
        )
    return {f"head.{kind}": torch.cat([heads[name] for name in names]) for kind, names in wanted.items()}


def to_official(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our weights under the published names: the inverse of `from_official`. More than one token means one a class."""
    found = {_rename(name, TO_PUBLISHED): value for name, value in weights.items()}
    if TOKENS in weights and weights[TOKENS].shape[1] > 1:
        for kind in ("weight", "bias"):
            if f"head.{kind}" in found:
                rows = found.pop(f"head.{kind}").split(1)
                found |= {f"head.{j}.{kind}": row for j, row in enumerate(rows)}
    return found


def to_per_class(weights: Mapping[str, Tensor], num_classes: int) -> dict[str, Tensor]:
    """Start of a per-class network from a single-token one: its token repeated for every class, all else as it is.

    The head's row j becomes class j's own. With `cls_in_keys=True` the per-class network computes what the single-token
    one did. In the paper's own form the logits differ through the token's own key, which the single token looks at and
    the classes' do not: a short fine-tuning follows (as in the paper, section 3.1).
    Raises RecastError if `weights` do not hold a single token.
    """
    token = weights.get(TOKENS)
    if token is None or token.shape[1] != 1:
        found = "none" if token is None else str(token.shape[1])
        raise RecastError(f"expected the weights of a PatchConvNet with one class token, found {found}")
    return dict(weights) | {TOKENS: token.repeat(1, num_classes, 1)}
