"""Suites of Touvron 2022 (tel-03945782): `crop`, the test crop (Table 3.22, Fig. 6.6), and `tokens`, the two heads of a
distilled DeiT apart (Table 3.3) with the cosine of their tokens (Sec. 3.3)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from timm.models.deit import VisionTransformerDistilled
from torch.nn import functional as F

from recast.lab.data.datasets import ImageFiles
from recast.lab.evaluation.context import Batch, Context, NotMeasured, Score, Source, is_correct
from recast.lab.evaluation.stats import plain_mean
from recast.lab.evaluation.suites import EVALUATORS, Evaluator
from recast.tracing.hooks import captured_outputs

CROPS = (0.875, 0.9, 0.95, 1.0)
"""Shares of the short side: of ResNets, ResMLP, "ResNet strikes back", and CaiT and DeiT III."""


def sources_crop(context: Context) -> list[Source]:
    """Return the validation images at each of `CROPS`. Raises NotMeasured where they were cropped in memory."""
    images = context.data.val
    if not isinstance(images, ImageFiles):
        raise NotMeasured(f"crop requires images in files, those of {context.data.name} are held in memory as cropped")
    return [Source(images.resized(images.img_size, share), f"{share:g}") for share in CROPS]


def score_crop(batch: Batch) -> Iterator[Score]:
    """Score top1@SHARE."""
    return batch.top1(f"top1@{batch.source.part}")


def sources_tokens(context: Context) -> list[Source]:
    """Return the validation images. Raises NotMeasured without a network that has a distillation token."""
    if not any(isinstance(model.model, VisionTransformerDistilled) for model in context.models.values()):
        raise NotMeasured("tokens requires a distilled DeiT of timm, such as deit_small_distilled_patch16_224")
    return [context.validation]


def score_tokens(batch: Batch) -> Iterator[Score]:
    """Score top1/class, top1/distillation, top1/mean of their logits, and the cosine of the two tokens: cosine@0 as
    learned, cosine@N after block N."""
    for name, model in batch.models.items():
        if not isinstance(network := model.model, VisionTransformerDistilled):
            continue
        heads = {"top1/class": network.head, "top1/distillation": network.head_dist}
        blocks = {f"cosine@{number}": block for number, block in enumerate(network.blocks, 1)}
        with captured_outputs((heads | blocks).items()) as outputs:
            mean = batch.context.logits(name, batch.images)
        for metric, logits in {**{head: outputs[head][0] for head in heads}, "top1/mean": mean}.items():
            yield Score(name, metric, is_correct(logits, batch.labels))
        assert network.cls_token is not None
        learned = torch.cat([network.cls_token, network.dist_token], 1).expand(len(batch), -1, -1)
        for metric, tokens in {"cosine@0": learned, **{block: outputs[block][0] for block in blocks}}.items():
            yield Score(name, metric, F.cosine_similarity(tokens[:, 0].float(), tokens[:, 1].float()))


EVALUATORS["crop"] = Evaluator(score_crop, sources=sources_crop)
EVALUATORS["tokens"] = Evaluator(score_tokens, sources=sources_tokens, statistics={"cosine": plain_mean})
