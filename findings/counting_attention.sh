#!/usr/bin/env bash
# torchinfo 1.8.0, thop 0.1.1.post2209072238, fvcore 0.1.5.post20221221: multiply-adds of the same attention by two forms.
# Expected: one number for both, 2·64·64·32 = 262144 for the products of 64 queries with 64 keys of 32 channels.
# Seen: torchinfo and thop count modules: 0 for any function. fvcore counts `@`, and 0 for scaled_dot_product_attention,
# which it names in a warning of its log. torch's own counter has both.
#   torchinfo: @ 0, scaled_dot_product_attention 0
#   thop: @ 0, scaled_dot_product_attention 0
#   fvcore: @ 262144, scaled_dot_product_attention 0
#   torch: @ 262144, scaled_dot_product_attention 262144
source "$(dirname "$0")/environment.sh" torch==2.15.0 torchinfo==1.8.0 thop==0.1.1.post2209072238 \
    fvcore==0.1.5.post20221221 iopath yacs portalocker termcolor tabulate
"$python" -W ignore - <<'PY'
import torch
from fvcore.nn import FlopCountAnalysis
from thop import profile
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from torchinfo import summary


class Products(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ x.mT).softmax(-1) @ x


class Fused(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.scaled_dot_product_attention(x, x, x, scale=1.0)


def by_torch(module: nn.Module, x: torch.Tensor) -> int:
    with FlopCounterMode(display=False) as counter:
        module(x)
    return counter.get_total_flops() // 2


counters = {
    "torchinfo": lambda module, x: summary(module, input_data=x, verbose=0).total_mult_adds,
    "thop": lambda module, x: int(profile(module, (x,), verbose=False)[0]),
    "fvcore": lambda module, x: int(FlopCountAnalysis(module, x).unsupported_ops_warnings(False).total()),
    "torch": by_torch,
}
x, counts = torch.randn(1, 1, 64, 32), {}
assert torch.allclose(Products()(x), Fused()(x), atol=1e-5)
for name, count in counters.items():
    counts[name] = count(Products(), x), count(Fused(), x)
    print(f"{name}: @ {counts[name][0]}, scaled_dot_product_attention {counts[name][1]}")
true = 2 * 64 * 64 * 32
assert counts == {"torchinfo": (0, 0), "thop": (0, 0), "fvcore": (true, 0), "torch": (true, true)}
PY
