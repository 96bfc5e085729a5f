"""Layers under torch.export, torch.jit.trace and torch.onnx.export: other sizes and batches than the example's."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from layer_helpers import PAD_1, PAPERS
from torch import Tensor, nn

from recast import CMHSA, GPSA, AttentionBeside, Geometry, RecastConfig
from recast.layers.attention_pool import AttentionPool
from recast.layers.config import PAPERS_LAYER

pytestmark = [
    pytest.mark.filterwarnings("ignore:.torch.jit:FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # torch's exporter, of its own code
]
ANY = ({0: torch.export.Dim.DYNAMIC, 2: torch.export.Dim.DYNAMIC, 3: torch.export.Dim.DYNAMIC},)
EXAMPLE, OTHERS = (2, 4, 7, 9), ((3, 4, 10, 8), (1, 4, 9, 12))


def pruned() -> GPSA:
    layer = GPSA(4, 6, PAD_1, config=PAPERS)
    layer.prune_((1, 4, 8), (4, 5))
    return layer


def biased(geometry: Geometry, groups: int = 1) -> CMHSA:
    layer = CMHSA(4, 4, geometry, groups=groups, config=RecastConfig(gate="bias", bias_init=3.0))
    layer.set_size_(12, 12)
    return layer


def gpsa(geometry: Geometry, groups: int = 1, **config: Any) -> GPSA:
    return GPSA(4, 4, geometry, groups=groups, config=RecastConfig(**{"gate": "linear"} | PAPERS_LAYER | config))


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "3×3": lambda: gpsa(PAD_1),
    "pruned": pruned,
    "linear content": lambda: gpsa(PAD_1, content="linear"),
    "sigmoid, strided, dilated": lambda: gpsa(Geometry((3, 3), (2, 2), (2, 2, 2, 2), dilation=(2, 2)), gate="sigmoid"),
    "depthwise, strided": lambda: gpsa(Geometry((5, 3), (2, 1), (2, 2, 1, 1)), 4),
    "grouped, reflected": lambda: gpsa(Geometry((3, 3), (1, 1), (1, 1, 1, 1), "reflect"), 2),
    "sees padding": lambda: gpsa(Geometry((2, 3), (2, 3), (1, 0, 3, 3)), attend_padding=True),
    "SAME": lambda: gpsa(Geometry((3, 2), (2, 2), same=True)),
    "transposed": lambda: gpsa(Geometry((4, 4), padding=(2, 2, 2, 3), upsample=(2, 2), is_transposed=True)),
    "C-MHSA": lambda: biased(PAD_1),
    "C-MHSA, strided": lambda: biased(Geometry((3, 3), (2, 2), (1, 1, 1, 1)), 2),
    "a token a class": lambda: AttentionPool(4, 5, start="average"),
}


def opened(layer: nn.Module, open_gates: Any) -> nn.Module:
    """The layer in eval mode, every parameter moved off its start."""
    if isinstance(layer, GPSA):
        return open_gates(layer).eval()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.5 * torch.randn(parameter.shape))
    return layer.eval()


def exported(layer: nn.Module, x: Tensor) -> nn.Module:
    return torch.export.export(layer, (x,), dynamic_shapes=ANY).module()


# reasoning about sizes takes the exporter seconds: one layer of each kind, the others are traced
@pytest.mark.parametrize(
    ("kind", "make"),
    [(kind, torch.jit.trace) for kind in LAYERS] + [("pruned", exported), ("C-MHSA, strided", exported)],
)
def test_traced_and_exported_layers_take_any_size(kind: str, make: Any, open_gates: Any, error_of: Any) -> None:
    layer, x = opened(LAYERS[kind](), open_gates), torch.randn(EXAMPLE)
    program = make(layer, x)
    for shape in (EXAMPLE, *OTHERS):
        x = torch.randn(shape)
        with torch.no_grad():
            assert error_of(program(x), layer(x)) < 1e-5


def operators(layer: nn.Module) -> set[str]:
    graph = torch.export.export(layer, (torch.randn(EXAMPLE),)).graph
    return {str(node.target) for node in graph.nodes if node.op == "call_function"}


def test_a_folded_layer_is_exported_as_its_convolution_and_any_other_with_its_maps(error_of: Any) -> None:
    layer, x = GPSA(4, 4, PAD_1, config=PAPERS).eval(), torch.randn(EXAMPLE)
    assert "aten.softmax.int" not in operators(copy.deepcopy(layer).fold())
    with torch.no_grad():
        layer.gamma[3] = layer.spread[2] = 0.5
        for program in (torch.export.export(layer, (x,)).module(), torch.jit.trace(layer, x)):
            assert error_of(program(x), layer(x)) < 1e-6
    assert "aten.softmax.int" in operators(layer)


def test_strict_export_and_backward_of_a_program_in_training(open_gates: Any, error_of: Any) -> None:
    layer, x = open_gates(GPSA(4, 4, PAD_1, config=PAPERS)), torch.randn(EXAMPLE)
    program = torch.export.export(layer, (x,), strict=True).module()
    for module in (layer, program):
        module(x).square().sum().backward()
    for name, parameter in program.named_parameters():
        assert error_of(parameter.grad, layer.get_parameter(name).grad) < 1e-4, name
    for switch in (program.train, program.eval):  # docs/export.md warns of both
        with pytest.raises(NotImplementedError):
            switch()


BESIDE: dict[str, Callable[[], nn.Module]] = {
    "beside 3×3": lambda: AttentionBeside(nn.Conv2d(4, 6, 3, padding=1)),
    "beside strided": lambda: AttentionBeside(nn.Conv2d(4, 6, 3, 2, 1)),
    "beside unpadded": lambda: AttentionBeside(nn.Conv2d(4, 6, 3)),
    "beside grouped": lambda: AttentionBeside(nn.Conv2d(4, 8, 3, 2, 1, groups=2)),
    "beside transposed": lambda: AttentionBeside(nn.ConvTranspose2d(4, 6, 4, 2, 1)),
}


@pytest.mark.parametrize(
    ("name", "opset"), [*((name, 17) for name in LAYERS | BESIDE), ("3×3", 11), ("beside strided", 11)]
)
@pytest.mark.filterwarnings("ignore")  # the older exporter's own
def test_the_older_onnx_exporter(name: str, opset: int, tmp_path: Path, open_gates: Any) -> None:
    """TensorRT and OpenVINO ask for it; it has no aten::mT, and unflatten keeps the example's sizes."""
    runtime = pytest.importorskip("onnxruntime")
    layer, path = opened((LAYERS | BESIDE)[name](), open_gates), tmp_path / "layer.onnx"
    options: dict[str, Any] = {"dynamo": False, "opset_version": opset, "verbose": False, "input_names": ["x"]}
    torch.onnx.export(layer, (torch.randn(EXAMPLE),), path, dynamic_axes={"x": {0: "b", 2: "h", 3: "w"}}, **options)
    session = runtime.InferenceSession(path)
    for shape in (EXAMPLE, *OTHERS):
        x = torch.randn(shape)
        (y,) = session.run(None, {"x": x.numpy()})
        torch.testing.assert_close(torch.from_numpy(y), layer(x).detach(), rtol=1e-4, atol=1e-5)
