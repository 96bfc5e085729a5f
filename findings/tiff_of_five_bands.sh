#!/usr/bin/env bash
# tifffile 2026.3.3, Pillow 13.0.0: a picture of 20 rows, 30 columns and five bands, saved by tifffile.imwrite.
# Expected: one page with five samples a pixel, and an error where a reader knows no such thing.
# Seen: without photometric= and planarconfig= tifffile writes 20 pages of 30×5. Pillow reads the first row as a picture.
#   tifffile: 20 pages; Pillow: mode I;16, 5×30, the first row
source "$(dirname "$0")/environment.sh" tifffile==2026.3.3 pillow==13.0.0 numpy==2.4.6
"$python" -W ignore - <<'PY'
import numpy as np
import tifffile
from PIL import Image

pixels = np.arange(20 * 30 * 5, dtype=np.uint16).reshape(20, 30, 5)
tifffile.imwrite("a.tif", pixels)
with tifffile.TiffFile("a.tif") as file:
    pages = len(file.pages)
image = Image.open("a.tif")
is_row = np.array_equal(np.asarray(image), pixels[0])
print(f"tifffile: {pages} pages; Pillow: mode {image.mode}, {image.width}×{image.height}, the first row: {is_row}")
assert (pages, image.size, is_row) == (20, (5, 30), True)
PY
