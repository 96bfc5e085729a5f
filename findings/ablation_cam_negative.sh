#!/usr/bin/env bash
# grad-cam 1.5.7: AblationCAM of a class whose logit is negative. The network reads the upper left corner for the class and
# the lower right corner against it.
# Expected: evidence for the class, as for a positive logit: adding a constant to a logit changes no prediction.
# Seen: the change of a logit is divided by the logit, so its sign turns the map round.
#   logit +1.5: for 1.00, against 0.00; logit -0.5: for 0.00, against 1.00
source "$(dirname "$0")/environment.sh" torch==2.15.0 torchvision==0.29.2 grad-cam==1.5.7 ttach opencv-python==5.0.0.93 \
    scikit-learn==1.9.1 matplotlib tqdm pillow
"$python" -W ignore - <<'PY' 2>/dev/null
import torch
from pytorch_grad_cam import AblationCAM
from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget
from torch import nn


class Corners(nn.Module):
    def __init__(self, constant: float) -> None:
        super().__init__()
        self.features, self.constant = nn.Conv2d(2, 2, 1, bias=False), constant
        self.features.weight.data = torch.eye(2)[..., None, None]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        means = self.features(x).amax((2, 3))
        score = means[:, 0] - 0.5 * means[:, 1] + self.constant
        return torch.stack([score, 0 * score], 1)


x = torch.zeros(1, 2, 8, 8)
x[0, 0, :2, :2], x[0, 1, -2:, -2:] = 1, 1
parts, maps = [], {}
for constant in (1.0, -1.0):
    model = Corners(constant)
    with AblationCAM(model, [model.features]) as cam:
        (picture,) = cam(x, [ClassifierOutputTarget(0)])
    logit = model(x)[0, 0].item()
    maps[logit] = picture[0, 0], picture[-1, -1]
    parts.append(f"logit {logit:+.1f}: for {picture[0, 0]:.2f}, against {picture[-1, -1]:.2f}")
print("; ".join(parts))
assert maps[1.5][0] > 0.9 > 0.1 > maps[1.5][1] and maps[-0.5][1] > 0.9 > 0.1 > maps[-0.5][0]
PY
