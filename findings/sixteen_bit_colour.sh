#!/usr/bin/env bash
# Pillow 13.0.0, datasets 5.2.0, opencv-python 5.0.0.93: 16-bit colour PNGs of a 12-bit camera.
# Expected: 16 bits, or an error or warning where a library cannot hold them.
# Seen: Pillow opens the file as 8-bit RGB: of 4,096 levels 16 are left. datasets' Image column, given the array, keeps
# the low byte of every number (300 becomes 44). Neither says so; 16-bit grey is exact in both.
#   Pillow: mode RGB, largest 15 of 4095
#   datasets: 300 becomes 44
source "$(dirname "$0")/environment.sh" pillow==13.0.0 datasets==5.2.0 opencv-python==5.0.0.93
"$python" -W ignore - <<'PY'
import cv2
import datasets
import numpy as np
from PIL import Image

pixels = np.arange(4096, dtype=np.uint16).reshape(64, 64, 1).repeat(3, 2)
cv2.imwrite("a.png", pixels)
assert cv2.imread("a.png", cv2.IMREAD_UNCHANGED).max() == 4095
image = Image.open("a.png")
print(f"Pillow: mode {image.mode}, largest {np.asarray(image).max()} of 4095")
assert (image.mode, np.asarray(image).max()) in {("RGB", 15), ("RGB", 16)}
column = datasets.Dataset.from_dict(
    {"image": [np.full((4, 4, 3), 300, np.uint16)]}, features=datasets.Features({"image": datasets.Image()})
)
value = np.asarray(column[0]["image"]).max()
print(f"datasets: 300 becomes {value}")
assert value == 44
PY
