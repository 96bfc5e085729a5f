"""What PatchConvNet costs: multiply-accumulates, memory by image size, speed beside networks of its compute.

    OMP_NUM_THREADS=1 python benchmarks/patchconvnet.py                        # all three
    OMP_NUM_THREADS=1 python benchmarks/patchconvnet.py throughput --device cuda --batch-size 256 --amp

gmac        → results/patchconvnet_gmac.csv: every size at 224 to 512 pixels beside what the published code counts
              (convolutions and matrix products; the paper's own figures are 0 to 1 % higher).
memory      → results/patchconvnet_memory.csv and _exponents.csv: is memory linear in pixels, as the paper says? S60
              and, as a control that must not be, DeiT-S with its attention written out. MiB of a batch, three ways:
                process  what a forward pass adds at its peak to the resident memory of a process of its own, which
                         holds model and images and has run a small batch before (CPU; Linux)
                alive    tensors alive at the same time in that pass: no allocator, no scratch memory
                saved    what autograd keeps for the backward pass of a training step, parameters left out
                device   instead of `process` on CUDA: torch's peak, weights and images included; batch 256 with --amp
                         is the paper's protocol
              The exponent is the slope of log bytes on log pixels: 1 is linear. The command fails where S60's is above
              1.05, or DeiT-S's is not: then the measure says nothing.
throughput  → results/patchconvnet_throughput.csv: images a second at 224, all networks by turns in one process; the
              ratios hold on a shared machine where the seconds do not. Random weights, eval mode.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import timm
import torch
from timing import RESULTS, by_turns, machine, ratio, spread, write
from timm.layers import set_fused_attn
from torch import Tensor, nn

import recast.models
from recast.evaluation.cost import count_macs, peak_memory

assert recast.models  # registers patchconvnet_*

SIDES = (224, 288, 320, 384, 512)
# GMAC at SIDES, counted on the published code
PUBLISHED_GMAC: dict[str, tuple[float, ...]] = {
    "s20": (1.637,),
    "s36": (2.574,),
    "s60": (3.980, 6.574, 8.115, 11.683, 20.764),
    "s120": (7.493, 12.379, 15.280, 21.999, 39.100),
    "b36": (10.214,),
    "b60": (15.803, 26.107, 32.226, 46.394, 82.460),
    "b120": (29.775, 49.192, 60.721, 87.420, 155.380),
    "l60": (28.043, 46.329, 57.186, 82.329, 146.330),
    "l120": (52.846, 87.308, 107.771, 155.157, 275.777),
}
MEMORY_SIDES = (224, 288, 384, 512)
NETWORKS: dict[str, dict[str, bool]] = {"patchconvnet_s60": {}, "deit_small_patch16_224": {"dynamic_img_size": True}}
PAPER_MIB = (1322, 2091, 3604, 6296)
"""S60 at MEMORY_SIDES in the paper: V100, batch 256, AMP."""
LINEAR = 1.05
BATCH_SIZE = {"cpu": 16, "cuda": 256}
BESIDE = ("resnet50", "deit_small_patch16_224", "convnext_tiny", "swin_tiny_patch4_window7_224")


def gmac() -> None:
    """Count on the meta device: no values are needed."""
    rows = []
    for name, published in PUBLISHED_GMAC.items():
        with torch.device("meta"):
            model = timm.create_model(f"patchconvnet_{name}").eval().requires_grad_(False)
        for number, side in enumerate(SIDES):
            counted = count_macs(model, torch.empty(1, 3, side, side, device="meta")) / 1e9
            known = published[number] if number < len(published) else None
            error = "" if known is None else f"{counted / known - 1:+.5f}"
            rows.append(
                {"network": f"patchconvnet_{name}", "side": side, "gmac": f"{counted:.3f}", "published": known or ""}
                | {"relative_error": error}
            )
            print(*rows[-1].values(), flush=True)
    write(RESULTS / "patchconvnet_gmac.csv", rows)
    worst = max(abs(float(row["relative_error"])) for row in rows if row["relative_error"])
    print(f"largest relative error {worst:.5f}")
    if worst > 1e-3:
        raise SystemExit("a count is more than 0.1 % off")


def network(name: str, device: str) -> nn.Module:
    """Random weights, attention written out."""
    set_fused_attn(False)
    with torch.device(device):
        return timm.create_model(name, **NETWORKS[name]).eval()


def saved_bytes(model: nn.Module, images: Tensor) -> int:
    """What autograd keeps of a forward pass in training mode: storages, each once, without the parameters'."""
    known = {p.untyped_storage()._cdata for p in model.parameters()}
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if (identity := tensor.untyped_storage()._cdata) not in known:
            kept.setdefault(identity, tensor)  # held, so that no other storage takes its place
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model.train()(images)
    assert output.requires_grad
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def resident(key: str) -> int:
    """Bytes of this process: VmRSS now, VmHWM at most since the last reset."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024


def job(name: str, side: int, batch_size: int) -> None:
    """In a process of its own: print what one forward pass adds to it, in bytes."""
    model, images = network(name, "cpu"), torch.randn(batch_size, 3, side, side)
    with torch.no_grad():
        model(images[:1, :, :64, :64])  # what the first call of a kernel sets up is no activation
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM := VmRSS
        before = resident("VmRSS")
        model(images)
    print(json.dumps(resident("VmHWM") - before))


def process_bytes(name: str, side: int, batch_size: int) -> int:
    """Above what the process had with the model loaded. Freed blocks go back at once, else they would count on."""
    call = [sys.executable, __file__, "job", name, str(side), str(batch_size)]
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    output = subprocess.run(call, check=True, stdout=subprocess.PIPE, text=True, env=environment).stdout
    return json.loads(output.splitlines()[-1])


def device_bytes(name: str, side: int, batch_size: int, device: str, amp: bool) -> int:
    """torch's peak of one forward pass, weights and images included."""
    model, images = network(name, device), torch.randn(batch_size, 3, side, side, device=device)
    torch.cuda.reset_peak_memory_stats(device)
    with torch.no_grad(), autocast(device, amp):
        model(images)
    return torch.cuda.max_memory_allocated(device)


def autocast(device: str, amp: bool) -> contextlib.AbstractContextManager[object]:
    kind = torch.device(device).type
    return (
        torch.autocast(kind, torch.float16 if kind == "cuda" else torch.bfloat16) if amp else contextlib.nullcontext()
    )


def memory(device: str, batch_size: int, amp: bool) -> None:
    """All measures at all sides, and their exponents."""
    on_cuda = torch.device(device).type == "cuda"
    rows, exponents = [], []
    for name in NETWORKS:
        model = network(name, "meta")
        measures: dict[str, Callable[[int], int]] = {
            "alive": lambda side, model=model: peak_memory(model.eval(), _nothing(batch_size, side)),
            "saved": lambda side, model=model: saved_bytes(model, _nothing(batch_size, side)),
        }
        if on_cuda:
            measures["device"] = partial(device_bytes, name, batch_size=batch_size, device=device, amp=amp)
        else:
            measures["process"] = partial(process_bytes, name, batch_size=batch_size)
        for measure, count in measures.items():
            sizes = [count(side) for side in MEMORY_SIDES]
            for side, size in zip(MEMORY_SIDES, sizes, strict=True):
                row = {"network": name, "measure": measure, "side": side, "batch_size": batch_size}
                paper = PAPER_MIB[MEMORY_SIDES.index(side)] if name == "patchconvnet_s60" else ""
                rows.append({**row, "mib": f"{size / 2**20:.1f}", "paper_mib_v100_256": paper, "machine": machine()})
                print(*rows[-1].values(), flush=True)
            exponents.append({"network": name, "measure": measure, "exponent": f"{exponent(sizes):.3f}"})
    exponents.append({"network": "patchconvnet_s60", "measure": "paper", "exponent": f"{exponent(PAPER_MIB):.3f}"})
    for row in exponents:
        print(*row.values())
    tag = "_cuda" if on_cuda else ""
    write(RESULTS / f"patchconvnet_memory{tag}.csv", rows)
    write(RESULTS / f"patchconvnet_exponents{tag}.csv", exponents)
    is_linear = {(row["network"], row["measure"]): float(row["exponent"]) <= LINEAR for row in exponents}
    wrong = [key for key, found in is_linear.items() if found != key[0].startswith("patchconvnet")]
    if wrong:
        raise SystemExit(f"not as claimed: {wrong}")


def _nothing(batch_size: int, side: int) -> Tensor:
    return torch.empty(batch_size, 3, side, side, device="meta")


def exponent(sizes: tuple[int, ...] | list[int]) -> float:
    """Slope of log bytes on log pixels."""
    return float(np.polyfit(2 * np.log(MEMORY_SIDES), np.log(sizes), 1)[0])


def throughput(device: str, batch_size: int, amp: bool, rounds: int) -> None:
    """Every network once a round; ratios of the same round to S60."""
    torch.manual_seed(0)
    images = torch.randn(batch_size, 3, 224, 224, device=device)
    models = {name: timm.create_model(name).eval().to(device) for name in ("patchconvnet_s60", *BESIDE)}

    def run(model: nn.Module) -> None:
        with torch.no_grad(), autocast(device, amp):
            model(images)
        if torch.device(device).type != "cpu":
            torch.accelerator.synchronize(device)

    seconds = by_turns({name: partial(run, model) for name, model in models.items()}, rounds, warm=2)
    place = torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else machine()
    rows = []
    for name, model in models.items():
        with torch.device("meta"):
            macs = count_macs(timm.create_model(name).eval().requires_grad_(False), _nothing(1, 224))
        rows.append(
            {"network": name, "device": device, "amp": amp, "batch_size": batch_size, "gmac": f"{macs / 1e9:.2f}"}
            | {"parameters": sum(p.numel() for p in model.parameters())}
            | {"images_per_second": f"{batch_size / statistics.median(seconds[name]):.2f}"}
            | {"s60_speed_to_this": f"{ratio(seconds[name], seconds['patchconvnet_s60']):.3f}"}
            | {"spread": f"{spread(seconds[name]):.3f}", "rounds": rounds, "machine": place}
        )
        print(*rows[-1].values(), flush=True)
    tag = "_cuda" if torch.device(device).type == "cuda" else ""
    write(RESULTS / f"patchconvnet_throughput{tag}.csv", rows)


def main() -> None:
    """The parts that are named, all of them without a name."""
    parts = ("gmac", "memory", "throughput")
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(parts)}; all without one")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch-size", type=int, help="default: 16 on CPU, 256 on CUDA")
    parser.add_argument("--amp", action="store_true", help="mixed precision")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    if unknown := set(options.parts) - set(parts):
        parser.error(f"parts are {', '.join(parts)}, got {', '.join(unknown)}")
    batch_size = options.batch_size or BATCH_SIZE.get(torch.device(options.device).type, 16)
    for part in options.parts or parts:
        if part == "gmac":
            gmac()
        elif part == "memory":
            memory(options.device, batch_size, options.amp)
        else:
            throughput(options.device, batch_size, options.amp, options.rounds)


if __name__ == "__main__":
    if sys.argv[1:2] == ["job"]:
        job(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    else:
        main()
