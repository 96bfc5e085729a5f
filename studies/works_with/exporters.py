"""Exporters and runtimes: does the file compute what the network does, at another batch too?"""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from quantisers import ONNX, run_onnx
from tools import Case, Cell, tool
from torch import Tensor

import recast


def written(case: Case) -> str:
    """Write the network by `recast.export`."""
    recast.export(case.model, case.images, "m.onnx")
    return "m.onnx"


@tool("ONNX Runtime", "run a file of `recast.export`", *ONNX)
def ort(case: Case) -> Tensor:
    return run_onnx(written(case), case.images)


@tool("onnx, ReferenceEvaluator", "run a file of `recast.export`", ONNX[1], *ONNX[2:], ONNX[0])
def reference(case: Case) -> Tensor:
    import onnx
    from onnx.reference import ReferenceEvaluator

    model = onnx.load(written(case))
    (outputs,) = ReferenceEvaluator(model).run(None, {model.graph.input[0].name: case.images.numpy()})
    return torch.from_numpy(np.array(outputs))


@tool("onnxsim", "simplify a file of `recast.export`", "onnxsim==0.8.1", *ONNX)
def simplified(case: Case) -> Tensor:
    import onnx
    import onnxsim

    model, is_checked = onnxsim.simplify(onnx.load(written(case)))
    assert is_checked
    onnx.save(model, "s.onnx")
    return run_onnx("s.onnx", case.images)


@tool("onnxslim", "slim a file of `recast.export`", "onnxslim==0.1.98", *ONNX)
def slimmed(case: Case) -> Tensor:
    import onnx
    import onnxslim

    onnx.save(onnxslim.slim(onnx.load(written(case))), "s.onnx")
    return run_onnx("s.onnx", case.images)


@tool("onnx2torch", "convert a file of `recast.export` back", "onnx2torch==1.5.15", *ONNX)
def back(case: Case) -> Tensor:
    from onnx2torch import convert

    return convert(written(case)).eval()(case.images).detach()


@tool(
    "OpenVINO, from ONNX",
    "`convert_model`, compile, run",
    "openvino==2026.4.1",
    *ONNX,
    remedy=dict.fromkeys(("works", "wrong"), "`INFERENCE_PRECISION_HINT` f32"),
)
def openvino_onnx(case: Case) -> Tensor:
    import openvino

    compiled = openvino.compile_model(openvino.convert_model(written(case)), "CPU")
    return torch.from_numpy(compiled(case.images.numpy())[0])


@tool("OpenVINO, from torch, f32", "`convert_model(child)`, `INFERENCE_PRECISION_HINT`", "openvino==2026.4.1")
def openvino_torch(case: Case) -> Tensor:
    import openvino

    model = openvino.convert_model(case.model, example_input=case.images[:2])
    compiled = openvino.compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    return torch.from_numpy(compiled(case.images.numpy())[0])


@tool("torch.jit.trace", "trace, save, load, run", "torch")
def traced(case: Case) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.trace(case.model, case.images[:2]).save("m.ts")
        return torch.jit.load("m.ts")(case.images).detach()


@tool("torch.jit.script", "script", "torch", remedy={"refused": "`torch.jit.trace`"})
def scripted(case: Case) -> Tensor:
    return torch.jit.script(case.model)(case.images).detach()


@tool("torch.export", "export, save, load, run at another batch", "torch")
def program(case: Case) -> Tensor:
    free = torch.export.Dim.DYNAMIC
    torch.export.save(torch.export.export(case.model, (case.images[:2],), dynamic_shapes=({0: free},)), "m.pt2")
    return torch.export.load("m.pt2").module()(case.images).detach()


@tool("AOTInductor", "`aoti_compile_and_package` of `torch.export`'s program", "torch")
def aoti(case: Case) -> Tensor:
    path = torch._inductor.aoti_compile_and_package(torch.export.export(case.model, (case.images,)))
    return torch._inductor.aoti_load_package(path)(case.images).detach()


@tool("torch.compile", "compile, run, and run at another size", "torch")
def compiled(case: Case) -> Tensor:
    model: Any = torch.compile(copy.deepcopy(case.model))
    with torch.no_grad():
        model(case.images[:2, :, :64, :64])
        return model(case.images)


@tool("torch.fx, symbolic_trace", "trace with the recast layers as leaves", "torch")
def fx(case: Case) -> Tensor:
    class Tracer(torch.fx.Tracer):
        def is_leaf_module(self, module: torch.nn.Module, name: str) -> bool:
            return isinstance(module, recast.AttentionBeside | recast.GPSA) or super().is_leaf_module(module, name)

    graph = Tracer().trace(case.model)
    return torch.fx.GraphModule(case.model, graph)(case.images).detach()


@tool("ExecuTorch", "lower `torch.export`'s program to XNNPACK, run the file", "executorch==1.5.1")
def executorch(case: Case) -> Tensor:
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import to_edge_transform_and_lower
    from executorch.runtime import Runtime

    exported = torch.export.export(case.model, (case.images,))
    lowered = to_edge_transform_and_lower(exported, partitioner=[XnnpackPartitioner()]).to_executorch()
    Path("m.pte").write_bytes(lowered.buffer)
    return Runtime.get().load_program("m.pte").load_method("forward").execute([case.images])[0]


@tool("litert-torch", "`convert` to LiteRT, run the model", "litert-torch==0.10.0")
def litert(case: Case) -> Tensor:
    import litert_torch

    return torch.from_numpy(np.array(litert_torch.convert(case.model, (case.images,))(case.images)))


@tool("coremltools", "`convert` `torch.export`'s program to an ML program", "coremltools==9.0")
def coreml(case: Case) -> Cell:
    import coremltools

    exported = torch.export.export(case.model, (case.images,)).run_decompositions({})
    coremltools.convert(exported, minimum_deployment_target=coremltools.target.iOS17)
    return Cell("works", None, "converted; running it needs macOS")


@tool(
    "pnnx and ncnn",
    "`torch.onnx.export` of one size, `pnnx.convert`, run one image at a time",
    "ncnn==1.0.20261020",
    "pnnx==20261020",
    *ONNX[1:],
    remedy={"refused": "ncnn has no slice with a step: use attention beside the convolution"},
)
def ncnn(case: Case) -> Tensor:
    import ncnn
    import pnnx

    torch.onnx.export(case.model, (case.images[:1],), "m.onnx", dynamo=True, external_data=False, verbose=False)
    pnnx.convert("m.onnx", (case.images[:1],), fp16=False)
    outputs = []
    with ncnn.Net() as net:
        net.opt.use_fp16_packed = net.opt.use_fp16_storage = net.opt.use_fp16_arithmetic = False
        net.opt.use_bf16_storage = False
        if net.load_param("m.ncnn.param") or net.load_model("m.ncnn.bin"):
            raise RuntimeError("ncnn does not load the file")  # running it would end the process
        for image in case.images:
            with net.create_extractor() as extractor:
                extractor.input("in0", ncnn.Mat(image.numpy()).clone())
                outputs.append(torch.from_numpy(np.array(extractor.extract("out0")[1])))
    return torch.stack(outputs)


@tool(
    "IREE",
    "compile a file of `recast.export` for the CPU",
    "iree-base-compiler==3.13.0",
    "iree-base-runtime==3.13.0",
    *ONNX,
)
def iree(case: Case) -> Tensor:
    import subprocess
    import sys

    import iree.compiler
    import iree.runtime

    torch.onnx.export(case.model, (case.images,), "f.onnx", dynamo=True, external_data=False, verbose=False)
    subprocess.run([sys.executable, "-m", "iree.compiler.tools.import_onnx", "f.onnx", "-o", "m.mlir"], check=True)
    binary = iree.compiler.compile_file("m.mlir", target_backends=["llvm-cpu"])
    config = iree.runtime.Config("local-task")
    module = iree.runtime.load_vm_module(iree.runtime.VmModule.copy_buffer(config.vm_instance, binary), config)
    (name,) = (n for n in module.vm_module.function_names if not n.startswith("__") and not n.endswith("$async"))
    return torch.from_numpy(np.array(module[name](case.images.numpy()).to_host()))


@tool("TVM", "`from_exported_program`, build for the CPU, run", "apache-tvm==0.27.0.post1")
def tvm(case: Case) -> Tensor:
    import tvm
    from tvm import relax
    from tvm.relax.frontend.torch import from_exported_program

    module = from_exported_program(torch.export.export(case.model, (case.images,)))
    machine = relax.VirtualMachine(tvm.compile(module, target="llvm"), tvm.cpu())
    outputs = machine["main"](tvm.runtime.tensor(case.images.numpy()))
    return torch.from_numpy((outputs if hasattr(outputs, "numpy") else outputs[0]).numpy())
