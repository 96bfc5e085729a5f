#!/usr/bin/env bash
# torchvision 0.29.2, opencv-python 5.0.0.93, datasets 5.2.0: one folder of photographs with EXIF orientation.
# Expected: the same pixels from every loader (training on one, serving with another).
# Seen: opencv and datasets rotate, torchvision's ImageFolder and decode_image do not: 40 rows of 20 or 20 rows of 40.
#   opencv (40, 20), datasets (40, 20), ImageFolder (20, 40), decode_image (20, 40)
source "$(dirname "$0")/environment.sh" torchvision==0.29.2 opencv-python==5.0.0.93 datasets==5.2.0 pillow==13.0.0
export HF_HOME=$folder/hf
"$python" -W ignore - <<'PY'
from pathlib import Path

import cv2
import datasets
from PIL import Image
from torchvision.datasets import ImageFolder
from torchvision.io import decode_image

datasets.disable_progress_bars()
Path("data/a").mkdir(parents=True)
exif = Image.Exif()
exif[0x0112] = 6  # the camera was held upright
Image.new("RGB", (40, 20), "red").save("data/a/a.jpg", exif=exif)
of_pillow = [
    datasets.load_dataset("imagefolder", data_dir="data", split="train")[0]["image"], ImageFolder("data")[0][0],
]
rotated, stored = (image.size[::-1] for image in of_pillow)
sizes = {
    "opencv": cv2.imread("data/a/a.jpg").shape[:2], "datasets": rotated, "ImageFolder": stored,
    "decode_image": tuple(decode_image("data/a/a.jpg").shape[1:]),
}
print(", ".join(f"{name} {size}" for name, size in sizes.items()))
assert list(sizes.values()) == [(40, 20), (40, 20), (20, 40), (20, 40)]
PY
