#!/usr/bin/env bash
# onnx 1.23.2: ReferenceEvaluator on average pooling of a 7×7 map of ones with ceil_mode and count_include_pad, as torch's
# exporter writes nn.AvgPool2d(3, 3, ceil_mode=True).
# Expected: 1 everywhere, as ONNX Runtime and torch compute: there is no padding that could be counted.
# Seen: windows that hang over the far border are divided by cells that do not exist.
#   ONNX Runtime: 1.0 to 1.0; onnx.reference: 0.444 to 1.0
source "$(dirname "$0")/environment.sh" onnx==1.23.2 onnxruntime==1.32.0 numpy==2.4.6 ml_dtypes protobuf flatbuffers
"$python" -W ignore - <<'PY'
import numpy as np
import onnxruntime
from onnx import TensorProto, checker, helper
from onnx.reference import ReferenceEvaluator

node = helper.make_node(
    "AveragePool", ["x"], ["y"], kernel_shape=[3, 3], strides=[3, 3], ceil_mode=1, count_include_pad=1
)
info = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 1, None, None]) for name in "xy"]
graph = helper.make_graph([node], "pooling", info[:1], info[1:])
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
checker.check_model(model, full_check=True)
ones = {"x": np.ones((1, 1, 7, 7), np.float32)}
(by_runtime,) = onnxruntime.InferenceSession(model.SerializeToString()).run(None, ones)
(by_reference,) = ReferenceEvaluator(model).run(None, ones)
low, high = by_reference.min(), by_reference.max()
print(f"ONNX Runtime: {by_runtime.min()} to {by_runtime.max()}; onnx.reference: {low:.3f} to {high:.1f}")
assert (by_runtime == 1).all() and low < 0.7 and by_reference.shape == by_runtime.shape == (1, 1, 3, 3)
PY
