"""Format numbers as text (a true minus sign, grouped thousands, NaN as an en dash), and pixels as the URI of a PNG."""

from __future__ import annotations

import base64
import io
import math
import re
from collections.abc import Sequence
from itertools import product

import numpy as np
from numpy.typing import NDArray
from PIL import Image

MISSING = "–"
NBSP = "\u00a0"  # keeps a number and its unit on one line


def decimal(value: float, digits: int = 1) -> str:
    return f"{value:z,.{digits}f}".replace("-", "−") if math.isfinite(value) else MISSING


def signed(value: float, digits: int = 1) -> str:
    """Format a difference with its sign; zero has none."""
    text = decimal(value, digits)
    return f"+{text}" if value > 0 and text.strip("0.") else text


def percent(value: float) -> str:
    return f"{decimal(value)}{NBSP}%" if math.isfinite(value) else MISSING


def share(new: float, old: float, digits: int = 0) -> str:
    """Format the relative change from `old` to `new` in percent; "" if it is undefined."""
    defined = math.isfinite(new) and math.isfinite(old) and old != 0
    return f"{signed(100 * (new - old) / old, digits)}{NBSP}%" if defined else ""


def significant(value: float, digits: int = 2) -> str:
    """Format a number of any magnitude: 0.19, 0.00014, 9.1e−6."""
    text = re.sub(r"e\+?(-?)0*", r"e\1", f"{value:z.{digits}g}")
    return text.replace("-", "−") if math.isfinite(value) else MISSING


def two_digits(value: float) -> str:
    """Format a number with two significant digits, without an exponent from 10 on: 0.52, 9.1, 104, 1,070."""
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def three_digits(value: float) -> str:
    """Format a number with three significant digits, without an exponent from 100 on: 9.12, 502, 1,070."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def compact(value: float, digits: int | None = None) -> str:
    """Format 12,345,678 as 12.3 M, or with `digits` significant digits."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if math.isfinite(value) and float(f"{abs(value):.{digits or 4}g}") >= size:  # 999,960 is 1.00 M
            places = 1 + (abs(value) < 9.995 * size)
            text = significant(value / size, digits) if digits else decimal(value / size, places)
            return f"{text}{NBSP}{unit}"
    return decimal(value, 0 if value % 1 == 0 else 1)


def memory(value: float) -> str:
    """Format bytes in binary units."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if math.isfinite(value) and abs(value) >= size:
            return f"{decimal(value / size)}{NBSP}{unit}"
    return f"{decimal(value, 0)}{NBSP}B" if math.isfinite(value) else MISSING


def error(value: float) -> str:
    """Format a relative error: 0, 3e−7, 0.79."""
    return significant(value, 2 if value >= 0.001 else 1) if math.isfinite(value) else "not finite"


def duration(seconds: float) -> str:
    if not math.isfinite(seconds):
        return MISSING
    if seconds < 90:
        return f"{decimal(seconds, 1 if seconds < 10 else 0)}{NBSP}s"
    if seconds < 5400:
        return f"{decimal(seconds / 60)}{NBSP}min"
    return f"{decimal(seconds / 3600)}{NBSP}h"


def bounds(low: float, high: float, digits: int = 1) -> str:
    """Format an interval as `93.1 to 97.4`."""
    return f"{decimal(low, digits)} to {decimal(high, digits)}"


ARROWS = dict(zip(product((-1, 0, 1), repeat=2), "↖↑↗←•→↙↓↘", strict=True))


def head_labels(heads: int, kernel: Sequence[int]) -> list[str]:
    """Return the names of heads: their index or, if there is one per tap, where it is from the query.

    An arrow, a dot, or rows down and columns right, as on the pages of `recast explain` (`assets/words.js`).
    """
    if len(kernel) == 2 and kernel[0] * kernel[1] == heads:
        rows, columns = (range(-((k - 1) // 2), k - (k - 1) // 2) for k in kernel)
        return [ARROWS.get(tap) or "{},{}".format(*tap).replace("-", "−") for tap in product(rows, columns)]
    return [str(index) for index in range(heads)]


def leaves_out_zero(low: float, high: float, digits: int = 1) -> bool:
    """Return True if the interval excludes 0 as printed: one that ends at `0.0` does not."""
    return round(low, digits) > 0 or round(high, digits) < 0


def plural(count: int, noun: str) -> str:
    return f"{count:,}{NBSP}{noun}{'' if count == 1 else 's'}"


def png(pixels: NDArray[np.uint8], most: int | None = None) -> str:
    """Return pixels (height, width, 3 or 4) as the data: URI of a PNG, shrunk to sides of at most `most`."""
    buffer = io.BytesIO()
    picture = Image.fromarray(pixels)
    if most is not None:
        picture.thumbnail((most, most))
    picture.save(buffer, format="PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")
