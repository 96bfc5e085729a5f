import struct
import zlib
from pathlib import Path

import numpy as np
import tifffile
from PIL import Image


def write_deep(path: Path, pixels: np.ndarray) -> None:
    """Write 16 bits a number, also of colours, which Pillow does not."""
    height, width, bands = pixels.shape
    if path.suffix == ".png":
        rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in pixels)
        header = struct.pack(">2I5B", width, height, 16, (0, 4, 2, 6)[bands - 1], 0, 0, 0)
        chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")]
        packed = (struct.pack(">I", len(c)) + kind + c + struct.pack(">I", zlib.crc32(kind + c)) for kind, c in chunks)
        path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(packed))
    elif path.suffix == ".tif":
        tifffile.imwrite(path, pixels.squeeze(), photometric="rgb" if bands == 3 else "minisblack")
    elif path.suffix == ".jp2":
        Image.fromarray(pixels[..., 0]).save(path)
    else:
        kind = b"P5" if bands == 1 else b"P6"
        path.write_bytes(b"%s\n%d %d\n65535\n" % (kind, width, height) + pixels.astype(">u2").tobytes())
