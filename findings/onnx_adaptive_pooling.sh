#!/usr/bin/env bash
# torch 2.15.0: ONNX with free height and width of adaptive pooling to more than one cell (a pyramid head).
# Expected: a file that is right at every size, or an error at export (as the older exporter, dynamo=False, gives).
# Seen: the window of the example's size is written as a constant. Other sizes run without a word and are wrong.
#   16×16: error 3.0e-08
#   23×19: error 1.4e-01
source "$(dirname "$0")/environment.sh" torch==2.15.0 onnx==1.23.2 onnxscript==0.7.2 onnxruntime==1.32.0
"$python" -W ignore - <<'PY'
import onnxruntime
import torch
from torch import nn

torch.manual_seed(0)
module, free = nn.AdaptiveAvgPool2d(3).eval(), torch.export.Dim.DYNAMIC
example = torch.randn(2, 3, 16, 16)
torch.onnx.export(
    module, (example,), "m.onnx", dynamo=True, dynamic_shapes=({0: free, 2: free, 3: free},), external_data=False,
    verbose=False,
)
session = onnxruntime.InferenceSession("m.onnx")
errors = {}
for size in ((16, 16), (23, 19)):
    x = torch.randn(2, 3, *size)
    (y,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    errors[size] = (torch.from_numpy(y) - module(x)).abs().max().item()
    print(f"{size[0]}×{size[1]}: error {errors[size]:.1e}")
assert errors[16, 16] < 1e-5 < 1e-2 < errors[23, 19]
PY
