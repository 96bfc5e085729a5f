#!/usr/bin/env bash
# pycocotools 2.0.11, scikit-image 0.26.0, Pillow 13.0.0, opencv-python 5.0.0.93: the mask of an annotated right triangle
# with corners (2, 2), (6, 2), (2, 6), area 8.
# Expected: about 8 pixels by all, differing at the diagonal at most.
# Seen: COCO's code takes pixel centres within, the others the border too. Scored by COCO's code, the annotation drawn
# by Pillow has an intersection over union of 0.4 with itself.
#   {'pycocotools': 6, 'scikit-image': 15, 'Pillow': 15, 'opencv': 15}; IoU 0.4
source "$(dirname "$0")/environment.sh" pycocotools==2.0.11 scikit-image==0.26.0 pillow==13.0.0 \
    opencv-python==5.0.0.93 numpy==2.4.6
"$python" -W ignore - <<'PY'
import cv2
import numpy as np
from PIL import Image, ImageDraw
from pycocotools import mask
from skimage.draw import polygon

corners, side = [(2, 2), (6, 2), (2, 6)], 10
flat = [float(number) for corner in corners for number in corner]
drawn = {"pycocotools": mask.decode(mask.frPyObjects([flat], side, side))[..., 0]}
drawn["scikit-image"] = np.zeros((side, side), np.uint8)
drawn["scikit-image"][polygon([y for _, y in corners], [x for x, _ in corners])] = 1
picture = Image.new("L", (side, side))
ImageDraw.Draw(picture).polygon(corners, fill=1)
drawn["Pillow"] = np.array(picture)
drawn["opencv"] = cv2.fillPoly(np.zeros((side, side), np.uint8), [np.array(corners, np.int32)], 1)
counts = {name: int(pixels.sum()) for name, pixels in drawn.items()}
runs = [mask.encode(np.asfortranarray(drawn[name])) for name in ("Pillow", "pycocotools")]
iou = float(mask.iou(runs[:1], runs[1:], [0])[0, 0])
print(counts, f"IoU {iou:.1f}", sep="; ")
assert counts == {"pycocotools": 6, "scikit-image": 15, "Pillow": 15, "opencv": 15} and abs(iou - 0.4) < 1e-6
PY
