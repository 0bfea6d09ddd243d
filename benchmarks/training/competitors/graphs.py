"""The other projects that differentiate ONNX graphs: onnx-ad, and the training loop of onnxsim.

Both are given the exported model in training mode with a loss behind it, and run on the stock ONNX Runtime.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from benchmarks.training.competitors import Prepared, Unable, Workload


def prepare(workload: Workload, threads: int, variant: str) -> Prepared:
    """`variant` says which: "onnx-ad" or "onnxsim"."""
    return {"onnx-ad": _onnx_ad, "onnxsim": _onnxsim}[variant](workload, threads)


def _static(workload: Workload) -> Any:
    """The model in training mode with the batch size of the workload, and its constants as initializers."""
    import onnx

    model = onnx.load(workload.folder / "training.onnx")
    for value in model.graph.input:
        value.type.tensor_type.shape.dim[0].dim_value = len(workload.x[0])
    del model.graph.value_info[:]
    del model.graph.output[0].type.tensor_type.shape.dim[:]
    model = onnx.shape_inference.infer_shapes(model, data_prop=True)
    for node in list(model.graph.node):
        if node.op_type == "Constant":
            tensor = model.graph.initializer.add()
            tensor.CopyFrom(node.attribute[0].t)
            tensor.name = node.output[0]
            model.graph.node.remove(node)
        elif node.op_type == "Flatten":  # which onnxsim does not differentiate
            shape = onnx.numpy_helper.from_array(
                np.array([len(workload.x[0]), -1], np.int64), f"{node.output[0]}_shape"
            )
            model.graph.initializer.append(shape)
            reshape = onnx.helper.make_node("Reshape", [node.input[0], shape.name], list(node.output))
            node.CopyFrom(reshape)
    return model


def _onnx_ad(workload: Workload, threads: int) -> Prepared:
    import onnx
    import onnxruntime
    from onnx import helper

    begin = time.perf_counter()
    try:
        from onnx_ad import reverse

        model = _static(workload)
        graph = model.graph
        y = graph.output[0].name
        labels = helper.make_tensor_value_info("labels", onnx.TensorProto.INT64, workload.y[0].shape)
        graph.input.append(labels)
        graph.node.append(helper.make_node("SoftmaxCrossEntropyLoss", [y, "labels"], ["loss"]))
        del graph.output[:]
        graph.output.append(helper.make_tensor_value_info("loss", onnx.TensorProto.FLOAT, []))
        weights = {t.name: onnx.numpy_helper.to_array(t) for t in graph.initializer if t.name in workload.parameters}
        kept = [t for t in graph.initializer if t.name not in weights]
        del graph.initializer[:]
        graph.initializer.extend(kept)
        graph.input.extend(
            helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, w.shape) for n, w in weights.items()
        )
        derived = reverse(model, inputs=list(weights), outputs=["loss"], layout="onnx")
    except Exception as error:
        raise Unable(f"reverse: {type(error).__name__}: {' '.join(str(error).split())[:200]}") from error
    state, renewed = _write_optimizer(derived.graph, workload, weights)
    parts = {"derive": time.perf_counter() - begin}
    begin = time.perf_counter()
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    try:
        session = onnxruntime.InferenceSession(derived.SerializeToString(), options)
    except Exception as error:
        raise Unable(f"ONNX Runtime refuses its graph: {' '.join(str(error).split())[:200]}") from error
    parts["session"] = time.perf_counter() - begin
    of = onnxruntime.OrtValue.ortvalue_from_numpy
    held = {n: of(a) for n, a in state.items()}
    seed = of(np.ones((1,), np.float32))
    batches = [(of(x), of(y)) for x, y in zip(workload.x, workload.y)]
    names = ["loss", *renewed.values()]

    def step(i: int) -> float:
        x, y = batches[i % len(batches)]
        found = session.run_with_ort_values(names, {**held, "x": x, "labels": y, "adj_loss": seed})
        held.update(zip(renewed, found[1:]))
        return float(found[0].numpy())

    return Prepared(step, None, parts, ["the optimizer is the benchmark's: it has none"])


def _write_optimizer(graph: Any, workload: Workload, weights: dict[str, np.ndarray]) -> tuple[Any, dict[str, str]]:
    """Append PyTorch's update of every weight; the state at first, and the output that renews each input."""
    import onnx
    from onnx import helper

    serial = iter(range(1 << 30))

    def op(kind: str, *inputs: str, **attributes: Any) -> str:
        out = f"update_{next(serial)}"
        graph.node.append(helper.make_node(kind, list(inputs), [out], **attributes))
        return out

    def const(value: float | np.ndarray) -> str:
        name = f"update_{next(serial)}"
        array = np.asarray(value, None if isinstance(value, np.ndarray) else np.float32)
        graph.initializer.append(onnx.numpy_helper.from_array(array, name))
        return name

    def mix(a: float, x: str, b: float, y: str) -> str:
        return op("Add", op("Mul", x, const(a)), op("Mul", y, const(b)))

    state = dict(weights)
    renewed: dict[str, str] = {}
    lr, rule = workload.learning_rate, workload.optimizer

    def hold(name: str, first: np.ndarray, new: str) -> None:
        state[name] = first
        renewed[name] = new
        if name not in weights:
            graph.input.append(helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, first.shape))
        graph.output.append(helper.make_tensor_value_info(new, onnx.TensorProto.FLOAT, first.shape))

    if rule != "momentum":
        t = op("Add", "steps", const(1.0))
        hold("steps", np.zeros((), np.float32), t)
        c1 = op("Sub", const(1.0), op("Pow", const(0.9), t))
        c2 = op("Sqrt", op("Sub", const(1.0), op("Pow", const(0.999), t)))
        rate = op("Div", const(lr), c1)
    for name, weight in weights.items():
        g = op("Reshape", f"adj_{name}", const(np.array(weight.shape, np.int64)))
        zeros = np.zeros_like(weight)
        if rule == "momentum":
            v = op("Add", op("Mul", f"{name}_v", const(0.9)), g)
            hold(f"{name}_v", zeros, v)
            hold(name, weight, op("Sub", name, op("Mul", v, const(lr))))
            continue
        m = mix(0.9, f"{name}_m", 0.1, g)
        v = mix(0.999, f"{name}_v", 0.001, op("Mul", g, g))
        hold(f"{name}_m", zeros, m)
        hold(f"{name}_v", zeros, v)
        by = op("Add", op("Div", op("Sqrt", v), c2), const(1e-8))
        x = op("Mul", name, const(1 - lr * 0.01)) if rule == "adamw" else name
        hold(name, weight, op("Sub", x, op("Mul", rate, op("Div", m, by))))
    return state, renewed


def _onnxsim(workload: Workload, threads: int) -> Prepared:
    import onnx
    import onnxruntime
    from onnx import helper

    # its sessions have no option for the number of threads
    plain = onnxruntime.SessionOptions

    def limited() -> Any:
        options = plain()
        options.intra_op_num_threads = threads
        return options

    onnxruntime.SessionOptions = limited
    import onnxsim

    model = _static(workload)
    graph = model.graph
    y = graph.output[0].name
    classes = int(workload.y.max()) + 1
    hot = [np.moveaxis(np.eye(classes, dtype=np.float32)[t], -1, 1) for t in workload.y]
    graph.input.append(helper.make_tensor_value_info("labels", onnx.TensorProto.FLOAT, hot[0].shape))
    one = onnx.numpy_helper.from_array(np.array([1], np.int64), "class_axis")
    rest = onnx.numpy_helper.from_array(np.arange(workload.y.ndim - 1, dtype=np.int64), "all_axes")
    count = onnx.numpy_helper.from_array(np.float32(1 / workload.y[0].size), "share")
    graph.initializer.extend([one, rest, count])
    graph.node.extend(
        [  # log Σ exp z - Σ z·label, which are the operators that it differentiates
            helper.make_node("Exp", [y], ["exponentials"]),
            helper.make_node("ReduceSum", ["exponentials", "class_axis"], ["normalizer"], keepdims=0),
            helper.make_node("Log", ["normalizer"], ["logarithms"]),
            helper.make_node("Mul", [y, "labels"], ["masked"]),
            helper.make_node("ReduceSum", ["masked", "class_axis"], ["chosen"], keepdims=0),
            helper.make_node("Sub", ["logarithms", "chosen"], ["losses"]),
            helper.make_node("Mul", ["losses", "share"], ["shares"]),
            helper.make_node("ReduceSum", ["shares", "all_axes"], ["loss"], keepdims=0),
        ]
    )
    del graph.output[:]
    graph.output.append(helper.make_tensor_value_info("loss", onnx.TensorProto.FLOAT, []))
    kind = "sgd_momentum" if workload.optimizer == "momentum" else "adam"
    loop = onnxsim.compile_training_loop(model, "loss", workload.parameters, optimizer=kind)
    xs = list(workload.x)

    def step(i: int) -> float:
        at = i % len(xs)
        try:
            return float(loop({"x": xs[at], "labels": hot[at]}, lr=workload.learning_rate))
        except Exception as error:
            raise Unable(f"{type(error).__name__}: {' '.join(str(error).split())[:200]}") from error

    notes = ["one-hot labels, made beforehand", "compiles in its first step"]
    if workload.optimizer == "adamw":
        notes.append("its Adam has no weight decay")
    return Prepared(step, None, {}, notes)
