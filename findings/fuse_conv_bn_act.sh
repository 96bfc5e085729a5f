#!/usr/bin/env bash
# torch 2.15.0, timm 1.0.31: fuse_conv_bn_eval on timm's BatchNormAct2d (EfficientNet, RegNet, MobileNet).
# Expected: a fused convolution that is followed by the activation, or an error, since a convolution cannot hold one.
# Seen: BatchNormAct2d is a BatchNorm2d with an activation inside; the result has none, without a warning.
#   error to BatchNorm and ReLU 2.4e+00, to BatchNorm alone 7.2e-07
source "$(dirname "$0")/environment.sh" torch==2.15.0 timm==1.0.31
"$python" - <<'PY'
import torch
from timm.layers import BatchNormAct2d
from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

torch.manual_seed(0)
conv, norm = nn.Conv2d(3, 8, 3).eval(), BatchNormAct2d(8).eval()
norm.running_mean.normal_()
norm.running_var.uniform_(0.5, 2)
x = torch.randn(4, 3, 16, 16)
with torch.no_grad():
    fused = fuse_conv_bn_eval(conv, norm)(x)
    with_relu = norm(conv(x))
    alone = nn.functional.batch_norm(conv(x), norm.running_mean, norm.running_var, norm.weight, norm.bias)
errors = [(fused - y).abs().max().item() for y in (with_relu, alone)]
print(f"error to BatchNorm and ReLU {errors[0]:.1e}, to BatchNorm alone {errors[1]:.1e}")
assert errors[0] > 0.1 > 1e-4 > errors[1]
PY
