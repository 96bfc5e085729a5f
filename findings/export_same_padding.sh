#!/usr/bin/env bash
# torch 2.15.0, timm 1.0.31: torch.export with free height and width of strided convolutions with TensorFlow's SAME padding.
# Expected: each of them adds as much time as the one before.
# Seen: from the second on each takes about three times as long as all before: sizes after it are nested rounded
# quotients, which sympy simplifies again and again. The exported program is right;
# torch.export.save cannot write it (ceil has no place in the file).
#   seconds of 2, 3 and 4 convolutions: 1.9, 6.2, 21.1
source "$(dirname "$0")/environment.sh" torch==2.15.0 timm==1.0.31 torchvision==0.29.2 huggingface_hub safetensors pyyaml
"$python" -W ignore - <<'PY'
import io
import time

import torch
from timm.layers import Conv2dSame
from torch import nn

free, seconds = torch.export.Dim.DYNAMIC, {}
for count in (1, 2, 3, 4):  # the first call also imports
    network = nn.Sequential(*(Conv2dSame(3, 3, 3, stride=2) for _ in range(count))).eval()
    images = torch.randn(2, 3, 224, 224)
    started = time.process_time()
    program = torch.export.export(network, (images,), dynamic_shapes=({0: free, 2: free, 3: free},))
    seconds[count] = time.process_time() - started
    other = torch.randn(3, 3, 160, 256)
    assert torch.equal(program.module()(other), network(other))
try:
    torch.export.save(program, io.BytesIO())
    raise SystemExit("it can be saved now")
except Exception as error:
    print(type(error).__name__, str(error).splitlines()[0][:60])
print("seconds of 2, 3 and 4 convolutions:", ", ".join(f"{seconds[count]:.1f}" for count in (2, 3, 4)))
assert seconds[4] > 2 * seconds[3] > 4 * seconds[2]
PY
