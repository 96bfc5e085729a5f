"""Suites of Touvron 2022 (tel-03945782): `crop`, the test crop (Table 3.22, Fig. 6.6), `tokens`, the two heads of a
distilled DeiT apart (Table 3.3) with the cosine of their tokens (Sec. 3.3), and `branches`, the size of what every
branch of a transformer adds (Fig. 3.6)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from timm.models.cait import LayerScaleBlock
from timm.models.deit import VisionTransformerDistilled
from timm.models.vision_transformer import Block
from torch import nn
from torch.nn import functional as F

from recast.lab.data.datasets import ImageFiles
from recast.lab.evaluation.context import Batch, Context, NotMeasured, Score, Source, is_correct
from recast.lab.evaluation.evaluators import evaluates
from recast.lab.evaluation.stats import plain_mean
from recast.tracing.hooks import captured_inputs, captured_outputs

CROPS = (0.875, 0.9, 0.95, 1.0)
"""Shares of the short side: of ResNets, ResMLP, "ResNet strikes back", and CaiT and DeiT III."""


def sources_crop(context: Context) -> list[Source]:
    """Return the validation images at each of `CROPS`. Raises NotMeasured where they were cropped in memory."""
    images = context.data.val
    if not isinstance(images, ImageFiles):
        raise NotMeasured(f"crop requires images in files, those of {context.data.name} are held in memory as cropped")
    return [Source(images.resized(images.img_size, share), f"{share:g}") for share in CROPS]


@evaluates("crop", sources=sources_crop)
def score_crop(batch: Batch) -> Iterator[Score]:
    """Score top1@SHARE."""
    return batch.top1(f"top1@{batch.source.part}")


def sources_tokens(context: Context) -> list[Source]:
    """Return the validation images. Raises NotMeasured without a network that has a distillation token."""
    if not any(isinstance(model.model, VisionTransformerDistilled) for model in context.models.values()):
        raise NotMeasured("tokens requires a distilled DeiT of timm, such as deit_small_distilled_patch16_224")
    return [context.validation]


@evaluates("tokens", sources=sources_tokens, statistics={"cosine": plain_mean})
def score_tokens(batch: Batch) -> Iterator[Score]:
    """Score top1/class, top1/distillation, top1/both (the mean of their logits), and the cosine of the two tokens.

    cosine@0 is that of the learned tokens, cosine@N that after block N.
    """
    for name, model in batch.models.items():
        if not isinstance(network := model.model, VisionTransformerDistilled):
            continue
        assert network.cls_token is not None
        heads = {"top1/class": network.head, "top1/distillation": network.head_dist}
        blocks = {f"cosine@{number}": block for number, block in enumerate(network.blocks, 1)}
        with captured_outputs((heads | blocks).items()) as outputs:
            both = batch.context.logits(name, batch.images)
        logits = {key: outputs[key][0] for key in heads} | {"top1/both": both}
        learned = torch.cat([network.cls_token, network.dist_token], 1).expand(len(batch), -1, -1)
        tokens = {"cosine@0": learned} | {key: outputs[key][0] for key in blocks}
        for key, values in logits.items():
            yield Score(name, key, is_correct(values, batch.labels))
        for key, values in tokens.items():
            yield Score(name, key, F.cosine_similarity(values[:, 0].float(), values[:, 1].float()))


def blocks_of(network: nn.Module) -> list[Block | LayerScaleBlock]:
    """Return the blocks of a ViT, DeiT or CaiT whose tokens are images' patches, in their order."""
    return [block for block in network.modules() if isinstance(block, Block | LayerScaleBlock)]


def sources_branches(context: Context) -> list[Source]:
    """Return the validation images. Raises NotMeasured without a network that has such blocks."""
    if not any(blocks_of(model.model) for model in context.models.values()):
        raise NotMeasured("branches requires a ViT, DeiT or CaiT of timm, such as deit_small_patch16_224")
    return [context.validation]


@evaluates("branches", sources=sources_branches, statistics={"branch": plain_mean})
def score_branches(batch: Batch) -> Iterator[Score]:
    """Score branch/attention@N and branch/mlp@N: ‖g(x)‖ / ‖x‖ of block N, x the tokens that the branch is added to."""
    for name, model in batch.models.items():
        blocks = {str(number): block for number, block in enumerate(blocks_of(model.model), 1)}
        norms = {
            f"{part}@{number}": getattr(block, norm)
            for number, block in blocks.items()
            for part, norm in (("attention", "norm1"), ("mlp", "norm2"))
        }
        with captured_inputs(norms.items()) as inputs, captured_outputs(blocks.items()) as outputs:
            batch.context.logits(name, batch.images)
        for number in blocks:
            x, between, y = inputs[f"attention@{number}"][0], inputs[f"mlp@{number}"][0], outputs[number][0]
            for part, before, after in (("attention", x, between), ("mlp", between, y)):
                added, main = (tokens.float().flatten(1).norm(dim=1) for tokens in (after - before, before))
                yield Score(name, f"branch/{part}@{number}", added / main)
