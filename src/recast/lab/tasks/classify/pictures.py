"""Attention maps of a few validation images, for the report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from recast.files import replaced
from recast.lab.analysis.queries import telling_query
from recast.lab.data import Loader
from recast.lab.data.bands import as_picture
from recast.lab.evaluation.context import PixelModel
from recast.lab.evaluation.run_folder import OpenRun
from recast.layers.functional import expand_heads
from recast.layers.gpsa import gpsa_layers
from recast.modes import in_eval
from recast.tracing.hooks import hooked

NUM_PICTURES = 4


def write_pictures(run: OpenRun) -> Path:
    """Write RUN/attention.npz for the report: maps of the first validation images of a few different classes.

    For every GPSA layer i, and the query whose maps differ most between these images: `mix_i` (N, heads, rows, columns)
    over the pixels of its input, `query_i` (row, column), the content gates `gate_i` (heads,), and `kernel_i`.
    """
    first: dict[int, Tensor] = {}
    for images, labels in Loader(run.data.val, 1, bad_image="skip"):
        first.setdefault(int(labels), images)
        if len(first) == NUM_PICTURES:
            break
    model, pixels = run.models["recast"], torch.cat(list(first.values()))
    layers = gpsa_layers(model)
    drawn: dict[str, tuple[Tensor, tuple[int, int]]] = {}

    def draw(name: str, _layer: nn.Module, inputs: tuple[Any, ...]) -> None:
        drawn[name] = telling_query(layers[name], inputs[0])

    with in_eval(model), torch.no_grad(), hooked(layers.items(), before=draw):
        logits = PixelModel(model, run.data.mean, run.data.std)(pixels)
    arrays: dict[str, Any] = {
        "images": (as_picture(pixels) * 255).round().byte().permute(0, 2, 3, 1).numpy(),
        "labels": np.asarray(list(first), dtype=np.int64),
        "predictions": logits.argmax(1).numpy(),
        "classes": np.asarray(run.data.classes, dtype=np.str_),
        "layers": np.asarray(list(drawn), dtype=np.str_),
    }
    for i, (name, (mix, query)) in enumerate(drawn.items()):
        arrays[f"mix_{i}"], arrays[f"query_{i}"] = mix.float().numpy(), np.asarray(query)
        arrays[f"gate_{i}"] = expand_heads(layers[name].weights()).gates.content.detach().float().numpy()
        arrays[f"kernel_{i}"] = np.asarray(layers[name].geometry.kernel)
    path = run.folder / "attention.npz"
    with replaced(path) as temporary, temporary.open("wb") as file:
        np.savez_compressed(file, **arrays)
    return path
