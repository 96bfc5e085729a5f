"""The recipe to start from: your trained network and your data, a few epochs at a rate that does not hurt the parent.

    recast train finetune --model resnet50 --model.pretrained true --data.name folder --data-dir DIR --out RUN

Paper: none; the linear gate is this library's own. Time: about that of fine-tuning the parent twice, and the recast
layers' attention (`recast plan` prints it). Number reached: the recast network starts at exactly the parent's
accuracy.
"""

from __future__ import annotations

from recast.config import Recipe


def finetune() -> Recipe:
    """Linear gate, last stage, AdamW at 1e-4 (gates at 1e-3), one epoch of warm-up, 5 epochs."""
    return Recipe()
