#!/usr/bin/env bash
# kornia 0.8.3, scikit-learn 1.9.1, torchmetrics 1.9.0: mean IoU where a class is in neither truth nor prediction.
# Expected: the class is left out of the mean, as torchmetrics does.
# Seen: kornia counts it as IoU 1 (a set of many absent classes looks good), scikit-learn as 0.
#   classes 0 and 1: 0.75 and 0.8, class 2 absent: {'torchmetrics': 0.775, 'kornia': 0.85, 'scikit-learn': 0.517}
source "$(dirname "$0")/environment.sh" torch==2.15.0 kornia==0.8.3 kornia_rs scikit-learn==1.9.1 torchmetrics==1.9.0 \
    lightning-utilities
"$python" -W ignore - <<'PY'
import torch
from kornia.metrics import mean_iou
from sklearn.metrics import jaccard_score
from torchmetrics.classification import MulticlassJaccardIndex

truth = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1]])
prediction = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1]])
means = {
    "torchmetrics": MulticlassJaccardIndex(3)(prediction, truth).item(),
    "kornia": mean_iou(prediction, truth, 3).mean().item(),
    "scikit-learn": jaccard_score(truth[0], prediction[0], labels=[0, 1, 2], average="macro"),
}
print({name: round(float(value), 3) for name, value in means.items()})
iou = 3 / 4, 4 / 5
expected = {"torchmetrics": sum(iou) / 2, "kornia": (sum(iou) + 1) / 3, "scikit-learn": sum(iou) / 3}
assert all(abs(means[name] - value) < 1e-6 for name, value in expected.items())
PY
