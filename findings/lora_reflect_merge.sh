#!/usr/bin/env bash
# peft 0.21.2: LoRA on a convolution with reflecting padding, merged.
# Expected: the merged network computes what the adapted one did.
# Seen: the adapter's own convolution pads with zeros; merged into the kernel it pads as the base does. There is no warning.
#   zeros: merged differs by 1e-06; reflect: merged differs by 2e+00
source "$(dirname "$0")/environment.sh" torch==2.15.0 peft==0.21.2 \
    transformers==5.24.0 accelerate tokenizers regex psutil huggingface_hub
"$python" -W ignore - <<'PY'
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

errors = {}
for mode in ("zeros", "reflect"):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, padding_mode=mode))
    adapted = get_peft_model(network, LoraConfig(r=4, target_modules=["0"])).eval()
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:  # 0 at the start
            nn.init.normal_(parameter, std=0.5)
    x = torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        before = adapted(x)
        errors[mode] = (adapted.merge_and_unload()(x) - before).abs().max().item()
print("; ".join(f"{mode}: merged differs by {error:.0e}" for mode, error in errors.items()))
assert errors["zeros"] < 1e-4 < 0.1 < errors["reflect"]
PY
