"""Quantisers: does a recast network lose more than its parent? Random weights: hard to quantise."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from tools import Case, tool
from torch import Tensor

import recast

ONNX = ("onnxruntime==1.32.0", "onnx==1.23.2", "onnxscript==0.7.2")


def run_onnx(path: Path | str, images: Tensor) -> Tensor:
    """Return what ONNX Runtime computes."""
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    (outputs,) = session.run(None, {session.get_inputs()[0].name: images.numpy()})
    return torch.from_numpy(outputs)


@tool("torchao, Int8WeightOnlyConfig", "`quantize_` a recast network", "torchao==0.18.0")
def torchao_weights(case: Case) -> Tensor:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model = copy.deepcopy(case.model)
    quantize_(model, Int8WeightOnlyConfig())
    return model(case.images).detach()


@tool(
    "torchao, then recast.save",
    "save a network that was quantised",
    "torchao==0.18.0",
    remedy={"refused": "`recast.save` first, quantise after loading"},
)
def torchao_save(case: Case) -> Tensor:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model = copy.deepcopy(case.model)
    quantize_(model, Int8WeightOnlyConfig())
    recast.save(model, "child.safetensors")
    return recast.load("child.safetensors", parent=copy.deepcopy(case.parent))(case.images).detach()


@tool("torchao, PT2E", "`prepare_pt2e`, calibrate, `convert_pt2e`, for x86", "torchao==0.18.0")
def pt2e(case: Case) -> Tensor:
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
    from torchao.quantization.pt2e.quantizer.x86_inductor_quantizer import (
        X86InductorQuantizer,
        get_default_x86_inductor_quantization_config,
    )

    program: Any = torch.export.export(case.model, (case.images,)).module()
    quantizer = X86InductorQuantizer().set_global(get_default_x86_inductor_quantization_config())
    prepared = prepare_pt2e(program, quantizer)
    with torch.no_grad():
        prepared(case.images)
        return convert_pt2e(prepared)(case.images)


@tool("ONNX Runtime, static int8", "`quantize_static`, QDQ, per channel", *ONNX)
def ort_static(case: Case) -> Tensor:
    from onnxruntime.quantization import CalibrationDataReader, quantize_static

    recast.export(case.model, case.images, "m.onnx")

    class Reader(CalibrationDataReader):
        def __init__(self) -> None:
            import onnxruntime

            self.name = onnxruntime.InferenceSession("m.onnx").get_inputs()[0].name
            self.rows = iter([{self.name: case.images.numpy()}])

        def get_next(self) -> Any:
            return next(self.rows, None)

    quantize_static("m.onnx", "q.onnx", Reader(), per_channel=True)
    return run_onnx("q.onnx", case.images)


@tool("ONNX Runtime, dynamic int8", "`quantize_dynamic`", *ONNX)
def ort_dynamic(case: Case) -> Tensor:
    from onnxruntime.quantization import quantize_dynamic

    recast.export(case.model, case.images, "m.onnx")
    quantize_dynamic("m.onnx", "q.onnx")
    return run_onnx("q.onnx", case.images)


@tool("onnxconverter-common, fp16", "`convert_float_to_float16`", *ONNX[1:], "onnxconverter-common==1.16.0", ONNX[0])
def to_fp16(case: Case) -> Tensor:
    import onnx
    from onnxconverter_common.float16 import convert_float_to_float16

    recast.export(case.model, case.images, "m.onnx")
    onnx.save(convert_float_to_float16(onnx.load("m.onnx"), keep_io_types=True), "h.onnx")
    return run_onnx("h.onnx", case.images)


@tool("optimum-quanto", "`quantize` to int8 weights, `freeze`", "optimum-quanto==0.2.7")
def quanto(case: Case) -> Tensor:
    from optimum.quanto import freeze, qint8, quantize

    model = copy.deepcopy(case.model)
    quantize(model, weights=qint8)
    freeze(model)
    return model(case.images).detach()


@tool("NNCF", "`nncf.quantize` of OpenVINO's model", "nncf==3.4.0", "openvino==2026.4.1")
def nncf_openvino(case: Case) -> Tensor:
    import nncf
    import openvino

    model = openvino.convert_model(case.model, example_input=case.images)
    quantized = nncf.quantize(model, nncf.Dataset([case.images.numpy()]), subset_size=1)
    compiled = openvino.compile_model(quantized, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    return torch.from_numpy(compiled(case.images.numpy())[0])


@tool("torch.ao, FX", "`prepare_fx`, calibrate, `convert_fx`", "torch")
def torch_fx(case: Case) -> Tensor:
    from torch.ao.quantization import get_default_qconfig_mapping, quantize_fx

    prepared = quantize_fx.prepare_fx(
        copy.deepcopy(case.model),
        get_default_qconfig_mapping("x86"),
        (case.images,),
        prepare_custom_config={"non_traceable_module_class": [recast.AttentionBeside, recast.GPSA]},
    )
    with torch.no_grad():
        prepared(case.images)
        return quantize_fx.convert_fx(prepared)(case.images)
