#!/usr/bin/env bash
# torch 2.15.0: AveragedModel(use_buffers=True) with an exponential average, of a network with BatchNorm.
# Expected: running statistics are averaged; num_batches_tracked, which counts, is copied.
# Seen: the counter is averaged too and rounded: after 10 and then 20 batches the average has seen 11. BatchNorm with
# momentum=None divides by that number when it goes on.
#   mean 1.1, batches 11
source "$(dirname "$0")/environment.sh" torch==2.15.0
"$python" -W ignore - <<'PY'
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

norm = nn.BatchNorm2d(1)
average = AveragedModel(norm, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
for value, batches in ((1.0, 10), (2.0, 20)):  # the first call copies
    norm.running_mean.fill_(value)
    norm.num_batches_tracked.fill_(batches)
    average.update_parameters(norm)
mean, batches = average.module.running_mean.item(), average.module.num_batches_tracked.item()
print(f"mean {mean:.1f}, batches {batches}")
assert abs(mean - 1.1) < 1e-5 and batches == 11
PY
