#!/usr/bin/env bash
# lycoris-lora 4.1.3: LoRA, LoKr and LoHa of rank 4 and alpha 1 on a linear layer, merged into it.
# Expected: the merged layer computes what the adapted one did, for all three.
# Seen: merging multiplies LoHa's change by alpha / rank twice, so a quarter of it is left at rank 4. There is no warning.
#   share of the change that is left: lora 1.00, lokr 1.00, loha 0.25
source "$(dirname "$0")/environment.sh" torch==2.15.0 lycoris-lora==4.1.3 einops toml tqdm safetensors
"$python" -W ignore - <<'PY' 2>/dev/null
import torch
from lycoris import LycorisNetwork, create_lycoris
from torch import nn

LycorisNetwork.apply_preset({"target_module": ["Linear"]})
shares = {}
for algorithm in ("lora", "lokr", "loha"):
    torch.manual_seed(0)
    network, x = nn.Sequential(nn.Linear(16, 16), nn.Identity()), torch.randn(8, 16)
    plain = network(x).detach()
    adapters = create_lycoris(network, 1.0, linear_dim=4, linear_alpha=1, algo=algorithm)
    adapters.apply_to()
    for parameter in adapters.parameters():
        nn.init.normal_(parameter, std=0.5)
    change = (network(x) - plain).detach()
    adapters.restore()
    adapters.merge_to(1.0)
    merged = (network(x) - plain).detach()
    shares[algorithm] = float((merged * change).sum() / change.square().sum())
print("share of the change that is left: " + ", ".join(f"{name} {share:.2f}" for name, share in shares.items()))
assert abs(shares["lora"] - 1) < 1e-3 and abs(shares["lokr"] - 1) < 1e-3 and abs(shares["loha"] - 0.25) < 1e-3
PY
