"""The cost of differentiation for growing models: nodes, seconds to derive, memory of a model above 2 GB.

``python -m benchmarks.training.scale [RESULT.json]``
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.memory import resident


def sizes() -> dict[str, str]:
    """Nodes that differentiation adds."""
    from tests.large_models import float_weights, gpt, resnet50

    from onnxgrad import vjp

    image, text = resnet50(8, 10), gpt(12)
    statistics = {name for n in image.graph.node if n.op_type == "BatchNormalization" for name in n.input[3:5]}
    trained = [w for w in float_weights(image) if w not in statistics]
    cases: dict[str, tuple[Any, Any]] = {
        "ResNet-50, with respect to the image": (image, "x"),
        "ResNet-50, with respect to 161 weights": (image, trained),
        "GPT of 12 layers, with respect to all weights": (text, float_weights(text)),
    }
    found = {}
    for what, (model, wrt) in cases.items():
        before, after = len(model.graph.node), len(vjp(model, wrt=wrt).graph.node)
        found[f"nodes added per node: {what}"] = f"{(after - before) / before:.1f} ({before} → {after})"
    return found


def seconds() -> dict[str, str]:
    """Time to derive, and to create the session."""
    from tests.large_models import float_weights, gpt
    from tests.models import chain

    from onnxgrad import vjp
    from onnxgrad.runtime import Session

    found = {}
    model = gpt(48)
    vjp(gpt(1), wrt=float_weights(gpt(1)))  # what is imported only when it is needed
    begin = time.perf_counter()
    derived = vjp(model, wrt=float_weights(model))
    found["transformer of 48 layers, all weights"] = f"{time.perf_counter() - begin:.2f} s"
    begin = time.perf_counter()
    Session(derived.SerializeToString())
    found[f"a session of its {len(derived.graph.node):,} nodes"] = f"{time.perf_counter() - begin:.2f} s"
    model = chain(100_000)
    begin = time.perf_counter()
    vjp(model, wrt=["x", "w"])
    found["a chain of 100,000 nodes"] = f"{time.perf_counter() - begin:.1f} s"
    return found


def large(gigabytes: float = 2.5) -> dict[str, str]:
    """Peak memory while a file with external data is differentiated to another, × its weights."""
    with tempfile.TemporaryDirectory() as scratch:
        _write_large(Path(scratch, "model.onnx"), gigabytes)
        code = f"from benchmarks.training.scale import derive_large; derive_large({scratch!r})"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        if done.returncode:
            return {f"a model of {gigabytes} GB": f"failed: {done.stderr.strip().splitlines()[-1]}"}
        answer = json.loads(done.stdout.splitlines()[-1])
    ratio = answer["peak"] / answer["weights"]
    text = f"{answer['seconds']:.1f} s, peak memory {ratio:.2f} × the weights"
    return {f"a model of {gigabytes} GB, from file to file": text}


def _write_large(path: Path, gigabytes: float) -> None:
    import numpy as np
    import onnx
    from onnx import helper

    width = 4096
    count = round(gigabytes * 1e9 / (4 * width * width))
    nodes, tensors = [], []
    with open(path.with_suffix(".data"), "wb") as data:
        for i in range(count):
            tensor = onnx.TensorProto(name=f"w{i}", dims=[width, width], data_type=onnx.TensorProto.FLOAT)
            tensor.data_location = onnx.TensorProto.EXTERNAL
            where = {"location": path.with_suffix(".data").name, "offset": data.tell(), "length": 4 * width * width}
            for key, value in where.items():
                tensor.external_data.add(key=key, value=str(value))
            np.full(width * width, 1e-3 * (i + 1), np.float32).tofile(data)
            tensors.append(tensor)
            nodes.append(helper.make_node("MatMul", [f"v{i}", f"w{i}"], [f"v{i + 1}"], name=f"n{i}"))
    imports = [helper.make_opsetid("", 20)]
    x = helper.make_tensor_value_info("v0", onnx.TensorProto.FLOAT, ["N", width])
    y = helper.make_tensor_value_info(f"v{count}", onnx.TensorProto.FLOAT, ["N", width])
    model = helper.make_model(
        helper.make_graph(nodes, "large", [x], [y], tensors), opset_imports=imports, ir_version=10
    )
    onnx.save(model, path)


def derive_large(folder: str) -> None:
    """Differentiate the model in `folder` by its input and a weight; print seconds, peak memory and weights."""
    from onnxgrad.cli import main

    source, target = Path(folder, "model.onnx"), Path(folder, "gradient.onnx")
    begin = time.perf_counter()
    before = resident()
    sys.argv = ["onnxgrad", "grad", str(source), "--wrt", "v0", "--wrt", "w0", "-o", str(target)]
    try:
        main()
    except SystemExit as end:
        if end.code:
            raise
    peak = resident()
    weights = source.with_suffix(".data").stat().st_size
    print(json.dumps({"seconds": time.perf_counter() - begin, "peak": peak, "weights": weights, "before": before}))


if __name__ == "__main__":
    found = {**sizes(), **seconds(), **large()}
    for what, value in found.items():
        print(f"{what}: {value}", flush=True)
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(json.dumps(found, indent=1) + "\n")
