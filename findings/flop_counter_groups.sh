#!/usr/bin/env bash
# torch 2.15.0: FlopCounterMode in a training step of grouped convolutions (ResNeXt, ConvNeXt, MobileNet).
# Expected: three times the forward pass (gradients of the input and of the weight cost as much as the pass each).
# Seen: the gradient of the weight is counted as without groups, so it is multiplied by their number.
#   groups 1: training / inference 3.0
#   groups 8: training / inference 10.0
#   groups 64: training / inference 66.0
source "$(dirname "$0")/environment.sh" torch==2.15.0
"$python" - <<'PY'
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

ratios = []
for groups in (1, 8, 64):
    conv, x = nn.Conv2d(64, 64, 3, padding=1, groups=groups), torch.randn(1, 64, 14, 14, requires_grad=True)
    with FlopCounterMode(display=False) as inference:
        y = conv(x)
    with FlopCounterMode(display=False) as training:
        conv(x).sum().backward()
    ratios.append(training.get_total_flops() / inference.get_total_flops())
    print(f"groups {groups}: training / inference {ratios[-1]:.1f}")
assert ratios == [3, 10, 66]
PY
