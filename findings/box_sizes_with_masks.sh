#!/usr/bin/env bash
# torchmetrics 1.9.0: average precision of *boxes* by size, with and without masks in the same call.
# Expected: the sizes of boxes do not depend on whether masks are scored too.
# Seen: iou_type=("bbox", "segm") sorts boxes by the area of their masks. A thin object, a box of 40×40 pixels (medium)
# with a mask of 400 (small), moves from medium to small.
#   bbox alone: small -1, medium 1; bbox and segm: small 1, medium -1
source "$(dirname "$0")/environment.sh" torch==2.15.0 torchmetrics==1.9.0 lightning-utilities pycocotools==2.0.11
"$python" -W ignore - <<'PY'
import torch
from torchmetrics.detection import MeanAveragePrecision

mask = torch.zeros(1, 100, 100, dtype=torch.bool)
mask[0, 10:50, 10:20] = True
target = {"boxes": torch.tensor([[10.0, 10, 50, 50]]), "labels": torch.tensor([0]), "masks": mask}
values = {}
for kinds in (("bbox",), ("bbox", "segm")):
    metric = MeanAveragePrecision(iou_type=kinds)
    metric.update([target | {"scores": torch.tensor([0.9])}], [target])
    result = metric.compute()
    name = "bbox_map_" if len(kinds) == 2 else "map_"
    values[kinds] = tuple(round(result[f"{name}{size}"].item(), 3) for size in ("small", "medium"))
print("; ".join(f"{' and '.join(kinds)}: small {small:g}, medium {medium:g}" for kinds, (small, medium) in values.items()))
assert values == {("bbox",): (-1, 1), ("bbox", "segm"): (1, -1)}
PY
