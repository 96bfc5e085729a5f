#!/usr/bin/env bash
# onnxconverter-common 1.16.0 and onnxruntime 1.32.0: convert_float_to_float16, a function of that name in each, on a
# network with a BatchNorm whose running variance is 30,000. float16 holds numbers up to 65,504.
# Expected: the same file by both; the variance is kept.
# Seen: onnxconverter-common cuts every constant at 10,000, with a warning; ONNX Runtime's keeps it. The outputs differ by
# the factor sqrt(3).
#   variance 30000: onnxconverter-common 10000, onnxruntime 30000
source "$(dirname "$0")/environment.sh" onnx==1.23.2 onnxruntime==1.32.0 onnxconverter-common==1.16.0 \
    numpy==2.4.6 ml_dtypes protobuf packaging flatbuffers
"$python" -W ignore - <<'PY' 2>/dev/null
import numpy as np
from onnx import TensorProto, helper, numpy_helper
from onnxconverter_common.float16 import convert_float_to_float16 as by_common
from onnxruntime.transformers.float16 import convert_float_to_float16 as by_runtime

values = {"scale": 1.0, "bias": 0.0, "mean": 0.0, "variance": 30000.0}
constants = [numpy_helper.from_array(np.array([value], np.float32), name) for name, value in values.items()]
info = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 1, 4, 4]) for name in "xy"]
node = helper.make_node("BatchNormalization", ["x", *values], ["y"])
graph = helper.make_graph([node], "norm", info[:1], info[1:], constants)
variances = []
for convert in (by_common, by_runtime):
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    options = {} if convert is by_common else {"force_fp16_initializers": True}
    half = {constant.name: numpy_helper.to_array(constant) for constant in convert(model, **options).graph.initializer}
    assert half["variance"].dtype == np.float16
    variances.append(float(half["variance"][0]))
print(f"variance 30000: onnxconverter-common {variances[0]:.0f}, onnxruntime {variances[1]:.0f}")
assert variances == [10000, 30000]
PY
