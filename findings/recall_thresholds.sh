#!/usr/bin/env bash
# torchmetrics 1.9.0, pycocotools 2.0.11: average precision of detections where recall is a multiple of 0.01.
# Expected: equal values, since torchmetrics computes them with pycocotools.
# Seen: torchmetrics passes recall thresholds in float32 (torch.linspace), 36 of 101 above the exact ones. A recall of
# exactly that value no longer reaches it.
#   torchmetrics 0.6733, pycocotools 0.6832; 68 of 100 detected, 36 thresholds above
source "$(dirname "$0")/environment.sh" torch==2.15.0 torchmetrics==1.9.0 lightning-utilities pycocotools==2.0.11
"$python" -W ignore - <<'PY'
import contextlib
import io

import numpy as np
import torch
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval
from torchmetrics.detection import MeanAveragePrecision

# 100 images with an object each; FOUND of them are detected exactly
above = np.flatnonzero(torch.linspace(0, 1, 101).double().numpy() > np.linspace(0, 1, 101))
found = int(above[len(above) // 2])
box = [10.0, 10.0, 100.0, 100.0]
data = {
    "info": {}, "images": [{"id": i} for i in range(100)], "categories": [{"id": 1}],
    "annotations": [
        {"id": i + 1, "image_id": i, "category_id": 1, "bbox": box, "area": 1e4, "iscrowd": 0} for i in range(100)
    ],
}
with contextlib.redirect_stdout(io.StringIO()):
    truth = COCO()
    truth.dataset = data
    truth.createIndex()
    detections = [{"image_id": i, "category_id": 1, "bbox": box, "score": 0.9} for i in range(found)]
    coco = COCOeval(truth, truth.loadRes(detections), "bbox")
    coco.evaluate()
    coco.accumulate()
    coco.summarize()
metric = MeanAveragePrecision(box_format="xywh", backend="pycocotools")
for i in range(100):
    boxes, label = torch.tensor([box]), torch.tensor([1])
    none = {"boxes": boxes[:0], "labels": label[:0], "scores": torch.zeros(0)}
    hit = {"boxes": boxes, "labels": label, "scores": torch.tensor([0.9])}
    metric.update([hit if i < found else none], [{"boxes": boxes, "labels": label}])
measured, exact = float(metric.compute()["map"]), coco.stats[0]
print(f"torchmetrics {measured:.4f}, pycocotools {exact:.4f}; {found} of 100 detected, {len(above)} thresholds above")
assert len(above) == 36
assert abs(exact - measured - 1 / 101) < 1e-6
PY
