import timm
import torch

import recast

for i, n in enumerate(("a", "b")):
    torch.manual_seed(i)
    m = timm.create_model("digits_resnet", num_classes=10).eval()
    recast.save(m, f"/tmp/qs/{n}.safetensors", {"name": "timm:digits_resnet", "kwargs": {"num_classes": 10}})
