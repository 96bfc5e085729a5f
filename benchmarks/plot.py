"""Results as pictures: docs/speed_layer.png, speed_tokens.png, speed_roofline.png.

python benchmarks/plot.py
"""

from __future__ import annotations

import csv
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt

ROOT = Path(__file__).parents[1]
# Okabe and Ito's colours, told apart by most colour-blind people
COLOURS = {"naive": "#D55E00", "all open": "#0072B2", "3 open": "#56B4E9", "positional": "#009E73", "linear": "#E69F00"}
NAMES = {
    "naive": "paper's formula",
    "all open": "all 9 heads open",
    "3 open": "3 of 9 open",
    "positional": "positional",
    "linear": "linear content",
}
ARM_OF_SLOPE = {"all open": "#0072B2", "positional": "#009E73", "linear": "#E69F00", "conv": "#000000"}


def read(name: str) -> list[dict[str, str]]:
    """Rows of a result."""
    with (ROOT / "results" / name).open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def bars() -> None:
    """Time over the convolution's by map and arm, and the multiply-accumulates' share as a line."""
    rows = [row for row in read("layer.csv") if row["format"] == "contiguous"]
    maps = [(14, 512), (14, 256), (28, 256), (28, 128)]
    figure, axes = plt.subplots(1, 2, figsize=(11, 3.8), sharey=True)
    for axis, kind in zip(axes, ("forward", "forward+backward"), strict=True):
        for number, (side, channels) in enumerate(maps):
            here = {
                r["arm"]: r for r in rows if (r["side"], r["channels"], r["pass"]) == (str(side), str(channels), kind)
            }
            for place, arm in enumerate(NAMES):
                x, row = number + (place - 2) * 0.17, here[arm]
                axis.bar(
                    x, float(row["over_conv"]), 0.15, color=COLOURS[arm], label=NAMES[arm] if number == 0 else None
                )
                bound = float(row["macs_over_conv"])
                axis.plot([x - 0.075, x + 0.075], [bound, bound], color="black", linewidth=1.2)
        axis.set_xticks(range(len(maps)), [f"{side}²\n{channels} channels" for side, channels in maps])
        axis.set_yscale("log")
        axis.set_yticks([1, 2, 4, 8, 16], ["1", "2", "4", "8", "16"])
        axis.axhline(1, color="grey", linewidth=0.8)
        axis.set_title(f"{kind.replace('+', ' + ')}: time over the 3×3 convolution's")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].legend(frameon=False, fontsize=8, loc="upper left")
    figure.text(0.5, 0.0, "black lines: the same ratio in multiply-accumulates", ha="center", fontsize=8)
    figure.tight_layout()
    figure.savefig(ROOT / "docs" / "speed_layer.png", dpi=110)


def tokens() -> None:
    """Time against tokens, one line an arm, with its exponent."""
    rows = [row for row in read("layer_slopes.csv") if row["pass"] == "forward"]
    figure, axis = plt.subplots(figsize=(5.5, 3.8))
    for row in rows:
        if row["arm"] not in ARM_OF_SLOPE:
            continue
        sides = [int(key[3:]) for key in row if key.startswith("ms_")]
        times = [float(row[f"ms_{side}"]) for side in sides]
        axis.plot([s * s for s in sides], times, "o-", color=ARM_OF_SLOPE[row["arm"]])
        axis.annotate(f"{row['arm']}, L^{row['exponent']}", (sides[-1] ** 2, times[-1]), xytext=(6, -3),
                      textcoords="offset points", color=ARM_OF_SLOPE[row["arm"]], fontsize=8)  # fmt: skip
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlim(right=axis.get_xlim()[1] * 8)
    axis.set_xlabel("tokens L (pixels of the map)")
    axis.set_ylabel("milliseconds")
    axis.set_title(f"forward, {rows[0]['channels']} channels, {rows[0]['batch']} images")
    axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(ROOT / "docs" / "speed_tokens.png", dpi=110)


def roofline() -> None:
    """What a content head's steps take, over what its multiply-accumulates take at the convolution's speed."""
    rows = read("roofline.csv")
    maps = list(dict.fromkeys((row["side"], row["channels"]) for row in rows))
    parts = {"values (C wide)": "#0072B2", "queries, keys (C/9 wide)": "#56B4E9", "softmax": "#E69F00"}
    figure, axis = plt.subplots(figsize=(7, 3.8))
    for number, (side, channels) in enumerate(maps):
        here = [row for row in rows if (row["side"], row["channels"]) == (side, channels)]
        speed = next(float(row["gmacs"]) for row in here if row["step"] == "convolution")
        for place, kind in enumerate(("forward", "backward")):
            picoseconds: dict[str, float] = {}
            macs: dict[str, int] = {}
            for row in here:  # by the faster library
                if row["pass"] == kind and row["step"] != "convolution":
                    step, time = row["step"], float(row["picoseconds"])
                    picoseconds[step], macs[step] = min(picoseconds.get(step, time), time), int(row["macs"])
            least, bottom = 1e3 * sum(macs.values()) / speed, 0.0
            for part, colour in parts.items():
                wide = {"softmax": 0, "values (C wide)": int(channels)}.get(part)
                chosen = [s for s, n in macs.items() if n == wide or (wide is None and 0 < n < int(channels))]
                height = sum(picoseconds[step] for step in chosen) / least
                label = part if number + place == 0 else None
                axis.bar(number + 0.4 * place, height, 0.36, bottom, color=colour, label=label)
                bottom += height
            axis.annotate(f"{1 / bottom:.2f}", (number + 0.4 * place, bottom), ha="center", va="bottom", fontsize=8)
    names = [f"{side}²\n{channels} channels" for side, channels in maps]
    axis.set_xticks([n + 0.2 for n in range(len(maps))], names)
    axis.axhline(1, color="black", linewidth=1)
    axis.set_title("a content head's steps, over their bound (left forward, right backward)", fontsize=10)
    axis.legend(frameon=False, fontsize=8, loc="upper left")
    axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(ROOT / "docs" / "speed_roofline.png", dpi=110)


if __name__ == "__main__":
    bars()
    tokens()
    roofline()
