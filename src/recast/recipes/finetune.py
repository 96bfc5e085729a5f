"""The recipe to start from: every default of the library."""

from __future__ import annotations

from recast.run.config import Recipe


def finetune() -> Recipe:
    """your network, your data: linear gate, last stage, AdamW at 1e-4 (gates 1e-3), 5 epochs

    Paper: none; the linear gate is this library's own.
    Command: recast train finetune --model resnet50 --pretrained --data folder --data-dir DIR --out RUN
    Expected: the recast network starts at exactly the parent's accuracy.
    Cost: about that of fine-tuning the parent twice, and the recast layers' attention (`recast plan` prints it).
    Inferred: everything. One epoch of warm-up, and rates that do not hurt the parent.
    """
    return Recipe()
