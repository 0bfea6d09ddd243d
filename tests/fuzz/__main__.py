"""``python -m tests.fuzz [--seconds 600] [--case 0] [--only models]``: damaged and hostile files, at random.

Valid files (models of every kind, arrays, tables, checkpoints, pictures) are damaged: bytes are flipped, cut out,
repeated and made up; fields of the messages of a model are changed, dropped, doubled and swapped. Whatever comes of
it is read, and a model is examined and differentiated too. Only an ``OnnxGradError`` may come out, in little time and
memory; ONNX Runtime sees none of it. The work is done by a child, so that a crash is caught as well, and the seconds
are those of the processor. ``--case 17 --once`` repeats case 17. With ``--guided models`` (or "checkpoints", "data")
coverage guides what is tried, where atheris is installed (``fuzz_guided.py``).
"""

from __future__ import annotations

import argparse
import importlib.util
import io
import json
import logging
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from onnxgrad import OnnxGradError, grad
from onnxgrad.check import check
from onnxgrad.model_io import load_model
from onnxgrad.training import attach
from onnxgrad.training.data import Data, open_data
from onnxgrad.training.data.fields import Field
from onnxgrad.training.loop.checkpoint import Checkpoint
from tests.large_models import gpt, resnet50
from tests.model_io.function_models import transformer
from tests.models import mlp
from tests.training.models import classifier, trainable

SECONDS, MEMORY = 20, 3 << 30
#: Of the coverage-guided mode, and what damages the same kind of file where there is no atheris.
TARGETS = {"models": "models", "checkpoints": "files", "data": "files"}


class Hang(BaseException):
    """A case took longer than any may."""


# --- valid files ------------------------------------------------------------------------------------

_LOOPS = """<ir_version: 10, opset_import: ["": 21]>
    loops (float[N, 4] x, int64 n, bool c) =>
    (float[N, 4] y, float[K, N, 4] z, float[N, 4] w)
    <float[4, 4] m = {1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1}, int64[2] s = {-1, 4}> {
        y, z = Loop (n, c, x) <body = turn (int64 i, bool go, float[N, 4] a) =>
            (bool on, float[N, 4] b, float[N, 4] t) {
            on = Identity (go)
            t = MatMul (a, m)
            b = Tanh (t)
        }>
        h = If (c) <then_branch = yes () => (float[N, 4] p) { p = Exp (y) },
            else_branch = no () => (float[N, 4] q) { r = Reshape (y, s)  q = Softmax <axis = 1> (r) }>
        f, w0 = Scan <num_scan_inputs = 1, body = scan (float[4] e, float[4] k) => (float[4] l, float[4] o) {
            l = Add (e, k)  o = Mul (l, k)
        }> (v, h)
        v = ReduceSum <keepdims = 0> (x, u)
        u = Constant <value_ints = [0]> ()
        w = Identity (w0)
    }"""

_MIXED = """<ir_version: 10, opset_import: ["": 21]>
    mixed (float[2, 6, 5] x, int64[3] i) => (float[a] y, float[b, c, d] z)
    <float[4, 6, 3] k = {}, float[6] g = {1, 1, 1, 1, 1, 1}, int64[3] f = {0, 2, -1}, float[3] scales = {1, 1, 2}> {
        n = BatchNormalization <epsilon = 0.001> (x, g, g, g, g)
        p = MaxPool <kernel_shape = [2], strides = [1], pads = [1, 0]> (n)
        t = Transpose <perm = [0, 2, 1]> (p)
        q = Gather <axis = 1> (t, i)
        a, b = Split <axis = 2, num_outputs = 2> (q)
        e = Einsum <equation = "bij,bkj->bik"> (a, b)
        c = Concat <axis = -1> (e, a)
        z = Resize <mode = "linear"> (c, , scales)
        o = Slice (z, st, en, ax)
        st = Constant <value_ints = [0]> ()
        en = Constant <value_ints = [2]> ()
        ax = Constant <value_ints = [1]> ()
        pd = Constant <value_ints = [0, 1, 0, 0, 0, 1]> ()
        m = Pad <mode = "constant"> (o, pd)
        s = ReduceMean <keepdims = 0> (m, ax)
        sh = Shape (s)
        cs = ConstantOfShape <value = float[1] {2}> (sh)
        sc = ScatterElements <axis = 0> (s, ix, s)
        ix = Cast <to = 7> (cs)
        r = Mul (s, cs)
        l = LayerNormalization <axis = -1> (r, cs)
        w = Where (bo, l, r)
        bo = Greater (l, r)
        v = Expand (w, sh)
        y = Reshape (v, f1)
        f1 = Constant <value_ints = [-1]> ()
    }"""


@cache
def models() -> list[onnx.ModelProto]:
    """Small models, one of every kind of thing that a file can hold."""
    sparse = mlp()
    sparse.graph.sparse_initializer.append(
        onnx.helper.make_sparse_tensor(
            onnx.numpy_helper.from_array(np.ones(2, np.float32), "s"),
            onnx.numpy_helper.from_array(np.array([0, 3])),
            [2, 2],
        )
    )
    mixed = onnx.parser.parse_model(_MIXED.replace("float[4, 6, 3] k = {}, ", ""))
    small = resnet50(width=4, classes=3)
    del small.graph.node[40:]
    small.graph.output[0].name = small.graph.node[-1].output[0]
    return [
        *(mlp(), mlp(12), classifier(), trainable(), sparse, mixed, small),
        *(gpt(layers=1, width=8, heads=2, vocab=6, length=4), transformer(2)),
        onnx.parser.parse_model(_LOOPS),
        attach(classifier(), loss="mse", optimizer="adamw", clip_norm=1.0, ema=0.9, accumulate=True),
    ]


@cache
def files() -> list[tuple[str, bytes]]:
    """Valid files that are no models: (suffix, content)."""
    arrays = {"x": np.ones((5, 6), np.float32), "labels": np.arange(5) % 3}
    held, squeezed, one = io.BytesIO(), io.BytesIO(), io.BytesIO()
    np.savez(held, **arrays)
    np.savez_compressed(squeezed, **arrays)
    np.save(one, arrays["x"])
    found = [(".npz", held.getvalue()), (".npz", squeezed.getvalue()), (".npy", one.getvalue())]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "c.safetensors"
        run = {"step": 3, "epoch": 1, "row": 0, "history": {"epochs": []}, "callbacks": [], "drawing": {"seed": 0}}
        Checkpoint({"w": np.ones((2, 3), np.float32), "t": np.array(3)}, run, "abc").save(path)
        found.append((".safetensors", path.read_bytes()))
        try:
            import pyarrow as pa
            import pyarrow.feather
            import pyarrow.parquet
        except ImportError:
            pa = None
        if pa is not None:
            lists = pa.array([[0.5, 1.5]] * 5, pa.list_(pa.float32()))
            table = pa.table({"x": lists, "labels": arrays["labels"], "f": np.ones(5)})
            for how in ("NONE", "snappy", "gzip"):
                pyarrow.parquet.write_table(table, path, compression=how)
                found.append((".parquet", path.read_bytes()))
            pyarrow.feather.write_feather(table, str(path), compression="lz4")
            found.append((".arrow", path.read_bytes()))
        try:
            from PIL import Image
        except ImportError:
            return found
        picture = Image.fromarray(np.arange(192, dtype=np.uint8).reshape(8, 8, 3))
        for suffix in (".png", ".jpg", ".bmp", ".gif", ".webp", ".tif"):
            to = io.BytesIO()
            picture.save(to, {".jpg": "JPEG", ".tif": "TIFF"}.get(suffix, suffix[1:].upper()))
            found.append((suffix, to.getvalue()))
    return found


# --- damage -----------------------------------------------------------------------------------------

_INTEGERS = (0, 1, 2, 3, -1, -2, 5, 7, 16, 100, 2**15, 2**31 - 1, -(2**31), 2**31, 2**40, 2**62, 2**63 - 1, -(2**63))
_STRINGS = (
    "",
    "x",
    "\0",
    "a\0b",
    "é漢🙂",
    "../../../etc/passwd",
    "/etc/passwd",
    "w" * 1000,
    "value",
    "axis",
    "ai.onnx",
)
_OPERATORS = sorted({s.name for s in onnx.defs.get_all_schemas()})


def damaged(data: bytes, rng: random.Random) -> bytes:
    """`data` with some bytes changed, dropped, repeated or made up."""
    found = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4, 16))):
        at = rng.randrange(len(found) or 1)
        span = rng.choice((1, 2, 4, 8, 64))
        match rng.randrange(6):
            case 0:
                found[at : at + 1] = bytes([rng.randrange(256)])
            case 1:
                del found[at : at + span]
            case 2:
                found[at:at] = found[at : at + span]
            case 3:
                found[at:at] = rng.randbytes(span)
            case 4:
                found[at : at + 8] = rng.choice(_INTEGERS).to_bytes(8, "little", signed=True)
            case 5 if rng.random() < 0.2:
                del found[at:]
    return bytes(found)


def _messages(message: Message) -> Iterator[Message]:
    yield message
    for field, value in message.ListFields():
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            for inner in value if field.is_repeated else (value,):
                yield from _messages(inner)


def _scalar(field: FieldDescriptor, rng: random.Random, names: list[str]) -> Any:
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_STRING if field.type == FieldDescriptor.TYPE_BYTES:
            return rng.randbytes(rng.choice((0, 1, 4, 8, 100)))
        case FieldDescriptor.CPPTYPE_STRING:
            pool = rng.choice((names, names, names, _STRINGS, _OPERATORS)) or _STRINGS
            return rng.choice(pool)
        case FieldDescriptor.CPPTYPE_FLOAT | FieldDescriptor.CPPTYPE_DOUBLE:
            return rng.choice((0.0, -1.0, 1e30, float("nan"), float("inf"), 0.5))
        case FieldDescriptor.CPPTYPE_ENUM:
            return rng.choice(field.enum_type.values).number
        case FieldDescriptor.CPPTYPE_BOOL:
            return rng.random() < 0.5
    bits = 31 if field.cpp_type in (FieldDescriptor.CPPTYPE_INT32, FieldDescriptor.CPPTYPE_UINT32) else 63
    low = 0 if field.cpp_type in (FieldDescriptor.CPPTYPE_UINT32, FieldDescriptor.CPPTYPE_UINT64) else -(2**bits)
    return rng.choice([i for i in (*_INTEGERS, *range(20)) if low <= i < 2**bits])


def changed(source: onnx.ModelProto, rng: random.Random) -> onnx.ModelProto:
    """A copy of `source` with some of its fields changed, dropped, doubled or swapped."""
    model = onnx.ModelProto()
    model.CopyFrom(source)
    names = sorted({n for node in model.graph.node for n in (*node.input, *node.output)})
    for _ in range(rng.choice((1, 1, 1, 2, 3, 8))):
        found = list(_messages(model))
        kinds = sorted({type(m).__name__ for m in found})
        kind = rng.choice(kinds)  # rare kinds as often as common ones
        message = rng.choice([m for m in found if type(m).__name__ == kind])
        fields = [f for f, _ in message.ListFields()]
        if not fields or rng.random() < 0.1:
            fields = list(message.DESCRIPTOR.fields)
        _change(message, rng.choice(fields), rng, names)
    return model


def _change(message: Message, field: FieldDescriptor, rng: random.Random, names: list[str]) -> None:
    inner = field.type == FieldDescriptor.TYPE_MESSAGE
    held = getattr(message, field.name)
    if rng.random() < 0.15:
        message.ClearField(field.name)
    elif not field.is_repeated:
        if inner:
            held.SetInParent()
        else:
            setattr(message, field.name, _scalar(field, rng, names))
    else:
        items = list(held)
        at = rng.randrange(len(items)) if items else 0
        match rng.randrange(4):
            case 0 if items:
                del items[at]
            case 1 if items:
                items.insert(rng.randrange(len(items) + 1), items[at])
            case 2 if len(items) > 1:
                rng.shuffle(items)
            case _:
                new = type(items[at])() if inner and items else None if inner else _scalar(field, rng, names)
                if new is not None:
                    items[at : at + rng.randrange(2)] = [new]
        copies = [type(m).FromString(m.SerializePartialToString()) for m in items] if inner else items
        message.ClearField(field.name)
        getattr(message, field.name).extend(copies)


# --- what is done with them -------------------------------------------------------------------------


def use_model(path: Path) -> None:
    model = load_model(path)
    check(model)
    floats = [v.name for v in (*model.graph.inputs, *model.graph.initializers.values())]
    grad(path, wrt=[n for n in floats if n][:2] or ["x"])


_FIELDS = [Field("x", np.dtype(np.float32), (None,)), Field("labels", np.dtype(np.int64), (), label=True, classes=3)]


def use_data(path: Path) -> None:
    columns = open_data(path)
    if len(columns) == 1:
        columns["labels"] = open_data({"labels": np.zeros(5, np.int64)})["labels"]
    data = Data(columns, _FIELDS)
    next(data.batches(4, data.order([0], 4)))


def _use_picture(path: Path) -> None:
    folder = path.parent / "classes"
    columns = open_data(folder)
    field = Field("images", np.dtype(np.float32), (3, 8, 8))
    columns["images"].take(np.arange(1), field)


def case(number: int, folder: Path, only: str = "") -> tuple[str, Path, Callable[[Path], Any]]:
    """The case of this number: what it is, its file in `folder`, and what to do with that."""
    rng = random.Random(number)
    kind = only or rng.choice(("models", "models", "files"))
    if kind == "models":
        source = rng.choice(models())
        path = folder / "m.onnx"
        if rng.random() < 0.3:
            path.write_bytes(damaged(source.SerializeToString(), rng))
            return "bytes of a model", path, use_model
        path.write_bytes(changed(source, rng).SerializePartialToString())
        return "fields of a model", path, use_model
    suffix, data = rng.choice(files())
    path = folder / f"x{suffix}"
    if suffix in (".npz", ".npy", ".parquet", ".arrow"):
        use: Callable[[Path], Any] = use_data
    elif suffix == ".safetensors":
        use = Checkpoint.load
    else:
        path, use = folder / "classes" / "a" / f"x{suffix}", _use_picture
        path.parent.mkdir(parents=True, exist_ok=True)
        for old in path.parent.iterdir():
            old.unlink()
    path.write_bytes(damaged(data, rng))
    if use is _use_picture:
        return f"bytes of {suffix}", path, lambda _: _use_picture(folder / "x")
    return f"bytes of {suffix}", path, use


def attempt(number: int, folder: Path, only: str = "") -> tuple[str, str]:
    """Run the case of this number: what it was, and what came out of it (a traceback if it should not have)."""
    what, path, use = case(number, folder, only)

    def hang(*_: Any) -> None:
        raise Hang(f"more than {SECONDS} s")

    signal.signal(signal.SIGPROF, hang)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            use(path)
    except OnnxGradError as e:
        return what, type(e).__name__
    except (Exception, Hang):
        return what, traceback.format_exc()
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return what, "accepted"


def bound_memory() -> None:
    """Less memory than what a hostile header asks for, from now on."""
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))


def _work(args: argparse.Namespace) -> None:
    """The child: cases from ``--case`` on, a line of JSON each, until the time is over."""
    logging.disable()
    models(), files()
    bound_memory()
    begin, number = time.process_time(), args.case
    with tempfile.TemporaryDirectory() as folder:
        while time.process_time() - begin < args.seconds:
            print(json.dumps(["begin", number, time.process_time() - begin]), flush=True)
            print(json.dumps(["end", number, *attempt(number, Path(folder), args.only)]), flush=True)
            number += 1
            if args.once:
                break


def guided(target: str, seconds: float) -> int:
    """Let libFuzzer choose the cases; whether one failed."""
    keep = Path(tempfile.mkdtemp(prefix="onnxgrad-fuzz-"))
    command = [sys.executable, "-m", "tests.fuzz.guided", target, "--seconds", str(int(seconds)), "--keep", str(keep)]
    code = subprocess.run(command, check=False).returncode
    found = sorted(keep.iterdir())
    print(f"{len(found)} kinds of failure, kept in {keep}" if found else "no failure")
    if not found:
        keep.rmdir()
    return bool(found) or code != 0


def main() -> int:
    """Run a child until the time is over, a new one after each crash; what fell out, each kind once."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60, help="of the processor")
    parser.add_argument("--case", type=int, default=0, help="the first one")
    parser.add_argument("--once", action="store_true", help="only that one")
    parser.add_argument("--only", default="", choices=("", "models", "files"))
    parser.add_argument("--guided", choices=TARGETS, help="have coverage choose the cases")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        _work(args)
        return 0
    if args.guided:
        if importlib.util.find_spec("atheris") is not None:
            return guided(args.guided, args.seconds)
        print("atheris is not installed: damage at random instead")
        args.only = TARGETS[args.guided]
    counts: Counter[tuple[str, str]] = Counter()
    found: dict[str, int] = {}
    left, number, done = args.seconds, args.case, 0
    while left > 0:
        command = [sys.executable, "-m", "tests.fuzz", "--child", "--seconds", str(left), "--case", str(number)]
        command += ["--once"] * args.once + ["--only", args.only] * bool(args.only)
        spent, what = 0.0, "?"
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            for line in child.stdout:
                event, number, *more = json.loads(line)
                if event == "begin":
                    spent = more[0]
                    continue
                done += 1
                what, outcome = more
                if "Traceback" in outcome:
                    where = "\n".join(x for x in outcome.splitlines() if x.startswith(("  File", " " * 4)))[-500:]
                    last = outcome.strip().splitlines()[-1]
                    key = "\n".join(where.splitlines()[-4:]) + last.partition(":")[0]
                    if key not in found:
                        found[key] = number
                        print(f"--- case {number}, {what}\n{outcome}", flush=True)
                    outcome = last.partition(":")[0]
                counts[what, outcome] += 1
        number += 1
        left = 0 if args.once else left - max(spent, 1)
        if child.returncode:
            print(f"--- case {number - 1} ended its process with {child.returncode}", flush=True)
            found[f"crash {number - 1}"] = number - 1
        else:
            break
    print(f"{done} cases; {len(found)} kinds of failure")
    for (what, outcome), count in sorted(counts.items()):
        print(f"{count:8} {what:24} {outcome}")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
