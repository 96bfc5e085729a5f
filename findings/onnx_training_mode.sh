#!/usr/bin/env bash
# torch 2.15.0: ONNX of a network in training mode.
# Expected: BatchNorm with the statistics of the batch and random Dropout, as the module computes in training mode.
# Seen: BatchNorm uses its *running* statistics while Dropout is random: neither mode.
# torch warns of training mode, not of this.
#   BatchNorm alone: error to training mode 2.2e+00, to eval mode 4.8e-07
#   Dropout alone: two runs differ by 2.0
source "$(dirname "$0")/environment.sh" torch==2.15.0 onnx==1.23.2 onnxscript==0.7.2 onnxruntime==1.32.0
"$python" -W ignore - <<'PY'
import onnxruntime
import torch
from torch import nn

torch.manual_seed(0)


def file_of(module: nn.Module, x: torch.Tensor):
    torch.onnx.export(module, (x,), "m.onnx", dynamo=True, external_data=False, verbose=False)
    session = onnxruntime.InferenceSession("m.onnx")
    return lambda: torch.from_numpy(session.run(None, {session.get_inputs()[0].name: x.numpy()})[0])


x = torch.randn(8, 4, 6, 6)
norm = nn.BatchNorm2d(4).train()
norm.running_mean.fill_(2)
run = file_of(nn.Sequential(norm), x)
norm.running_mean.fill_(2)  # the export itself ran the module
norm.running_var.fill_(1)
in_eval = norm.eval()(x)
in_training = norm.train()(x)
to_training, to_eval = ((run() - y).abs().max().item() for y in (in_training, in_eval))
print(f"BatchNorm alone: error to training mode {to_training:.1e}, to eval mode {to_eval:.1e}")
drop = file_of(nn.Dropout(0.5).train(), torch.ones(1, 100))
differ = (drop() - drop()).abs().max().item()
print(f"Dropout alone: two runs differ by {differ}")
assert to_training > 0.5 > 0.1 > to_eval and differ == 2
PY
