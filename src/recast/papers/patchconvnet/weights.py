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
    """The second form of a name whose first form is among the pairs. One that fits none stays as it is: whoever loads
    the weights says that it is unexpected."""
    for old, new in pairs:
        if match := re.fullmatch(re.escape(old).replace(r"\*", "(.+)"), name):
            same = iter(match.groups())
            return re.sub(r"\*", lambda _, same=same: next(same), new)  # type: ignore[misc]
    return name


def from_official(checkpoint: Mapping[str, Any]) -> dict[str, Tensor]:
    """Published weights, one token or one a class, under our names; weights under our names come back as they are.

    Raises RecastError if a class's head is absent.
    """
    weights: Mapping[str, Tensor] = clean_state_dict(checkpoint.get("model", checkpoint))
    if not any(name.startswith("patch_embed.proj.") for name in weights):
        return dict(weights)
    heads = {name: value for name, value in weights.items() if CLASS_HEAD.fullmatch(name)}
    return {renamed(name, NAMES): value for name, value in weights.items() if name not in heads} | _joined(heads)


def _joined(heads: dict[str, Tensor]) -> dict[str, Tensor]:
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


def checkpoint_filter_fn(state_dict: Mapping[str, Any], model: nn.Module) -> dict[str, Tensor]:
    """Weights in our names for a PatchConvNet, from the published ones or ours.

    A single token is repeated for every class, whose own the head's row j becomes. With `cls_in_keys=True` the
    per-class network computes what the single-token one did. In the paper's own form the logits differ through the
    token's own key, which the single token looks at and the classes' do not: a short fine-tuning follows (as in the
    paper, section 3.1). Tokens of other classes give way to the model's own, new ones. The head is left as it came:
    whoever loads it replaces it for other classes, or says that it does not fit.
    """
    weights = from_official(state_dict)
    tokens, classes = weights.get(TOKENS), getattr(model.pool, "num_classes", None)
    if tokens is None or classes in (None, tokens.shape[1]):
        return weights
    own = model.state_dict()[TOKENS]
    return weights | {TOKENS: tokens.repeat(1, classes, 1) if tokens.shape[1] == 1 else own}
