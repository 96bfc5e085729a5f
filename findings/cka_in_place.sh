#!/usr/bin/env bash
# torch-cka 0.21: similarity of the outputs of a BatchNorm and of the ReLU(inplace=True) after it, as in most ResNets.
# Expected: below 1, since ReLU cuts half of the values: the same as with ReLU(inplace=False).
# Seen: 1. Hooks keep the tensor itself, which the in-place ReLU overwrites before it is read.
#   in place False: 0.87; in place True: 1.00
source "$(dirname "$0")/environment.sh" torch==2.15.0 torch-cka==0.21 matplotlib tqdm
"$python" -W ignore - <<'PY' 2>/dev/null
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch_cka import CKA

values = {}
for in_place in (False, True):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=in_place)).eval()
    images = DataLoader(TensorDataset(torch.randn(64, 3, 12, 12)), batch_size=64)
    cka = CKA(network, network, "a", "b", ["1"], ["2"])
    cka.compare(images, images)
    values[in_place] = cka.export()["CKA"].item()
print("; ".join(f"in place {in_place}: {value:.2f}" for in_place, value in values.items()))
assert values[False] < 0.99 < 0.9999 < values[True]
PY
