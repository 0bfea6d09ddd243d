"""The command, as a user runs it: files written, tables, exit codes, and one clear line for every error."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import onnxgrad
from onnxgrad import grad, hessian, hvp, jacobian, jvp, signature, value_and_grad, vjp
from onnxgrad.cli.app import COMMANDS, build
from onnxgrad.cli.app import command as one
from tests import commands as forked
from tests.models import assert_sound, chain, mlp, model, nodes_of, run, value

ENV = {k: v for k, v in os.environ.items() if k not in ("FORCE_COLOR", "COLUMNS", "TERM")}


def command(*args, cwd=None, env=None):
    return forked.command(*args, cwd=cwd, env={**ENV, **(env or {})})


@pytest.fixture
def path(tmp_path):
    onnx.save(mlp(), tmp_path / "m.onnx")
    return tmp_path / "m.onnx"


def assert_refused(done, says: str) -> None:
    """One clear message on stderr, exit code 2, nothing else."""
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert done.stderr.startswith("error: "), done.stderr
    assert says in done.stderr
    assert "Traceback" not in done.stderr
    assert "\x1b" not in done.stderr
    assert all(line.startswith("  ") for line in done.stderr.splitlines()[1:]), done.stderr


# --- grad -------------------------------------------------------------------------------------------


@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    ("mode", "function"),
    [
        ("grad", grad),
        ("value_and_grad", value_and_grad),
        ("vjp", vjp),
        ("jvp", jvp),
        ("jacobian", jacobian),
        ("hessian", hessian),
        ("hvp", hvp),
    ],
)
def test_grad_writes_what_the_library_gives(path, mode, function):
    out = path.parent / "d.onnx"
    done = command("grad", path, "--wrt", "w", "--wrt", "x", "--of", "y", "--mode", mode, "-o", out)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    written = onnx.load(out)
    assert written == function(path, wrt=["w", "x"], of="y")
    assert_sound(written)
    names = signature(written)
    for primal, made in {**names.cotangents, **names.gradients, **names.tangents}.items():
        assert any({made, primal} <= set(line.split()) for line in done.stdout.splitlines()), done.stdout
    for row in {**names.jacobians, **names.hessians}.values():
        assert all(made in done.stdout.split() for made in row.values()), done.stdout
    assert all(made in done.stdout.split() for made in names.products.values()), done.stdout
    count = len(list(nodes_of(written.graph)))
    assert f"{count} nodes, {count - len(mlp().graph.node):+d}" in done.stdout
    assert "\x1b" not in done.stdout
    assert sorted(os.listdir(path.parent)) == ["d.onnx", "m.onnx"]


@pytest.mark.parametrize(("mode", "shape"), [("sparse_jacobian", "float32[24]"), ("sparse_hessian", "float32[36]")])
def test_sparse_modes_take_sizes_of_dimensions(path, mode, shape):
    pytest.importorskip("scipy")
    out = path.parent / "d.onnx"
    assert_refused(command("grad", path, "--wrt", "x", "--mode", mode, "-o", out), "the shape of 'x' is not known")
    done = command("grad", path, "--wrt", "x", "--mode", mode, "--dim", "N=4", "-o", out)
    assert done.returncode == 0, done.stderr
    assert shape in done.stdout
    assert_sound(onnx.load(out))


def test_grad_says_when_it_raised_the_model(tmp_path):
    onnx.save(mlp(11), tmp_path / "old.onnx")
    done = command("grad", "old.onnx", "--wrt", "w", "-o", "new.onnx", cwd=tmp_path)
    assert done.returncode == 0
    assert "opset 11 → 18" in done.stdout


def test_grad_over_its_own_input(path):
    want = grad(path, wrt="w")
    assert_refused(command("grad", path, "--wrt", "w", "-o", path), "would write over MODEL")
    assert onnx.load(path) == mlp()
    assert command("grad", path, "--wrt", "w", "-o", path, "--force").returncode == 0
    assert onnx.load(path) == want


def test_grad_keeps_external_data_external(tmp_path):
    source = mlp()
    big = np.ones((3000, 2), np.float32)
    source.graph.initializer[0].CopyFrom(numpy_helper.from_array(big, "w"))
    source.graph.input[0].type.tensor_type.shape.dim[1].dim_value = 3000
    onnx.save(source, tmp_path / "m.onnx", save_as_external_data=True, location="w.bin", size_threshold=100)
    done = command("grad", "m.onnx", "--wrt", "w", "-o", "d.onnx", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "d.onnx.data").stat().st_size >= big.nbytes
    assert (tmp_path / "d.onnx").stat().st_size < big.nbytes
    got = run(onnx.load(tmp_path / "d.onnx"), {"x": np.ones((1, 3000), np.float32)})
    assert got["w_grad"].shape == (3000, 2)


def test_grad_carries_training_information_and_warns_in_one_line(path):
    source = mlp()
    source.training_info.add().update_binding.add(key="w", value="nowhere")
    onnx.save(source, path)
    done = command("grad", path, "--wrt", "w", "-o", path.parent / "d.onnx")
    assert done.returncode == 0
    assert done.stderr.startswith("warning: training information dropped")
    assert len(done.stderr.splitlines()) == 1


# --- check and ops ----------------------------------------------------------------------------------


def test_check_of_a_differentiable_model(path):
    done = command("check", path)
    assert (done.returncode, done.stderr) == (0, "")
    rows = {line.split()[0]: line.split()[1:3] for line in done.stdout.splitlines()[1:5]}
    assert rows == {"Add": ["1", "elementwise"], "MatMul": ["1", "linear"], "Mul": ["1", "elementwise"],
                    "Tanh": ["1", "elementwise"]}  # fmt: skip
    assert "differentiable: y with respect to x, w, b" in done.stdout
    assert command("check", path, "--wrt", "t", "--of", "y").stdout.count("elementwise") == 1


def _odd(tmp_path):
    nodes = [
        helper.make_node("Celu", ["x"], ["c"]),
        helper.make_node("Sign", ["c"], ["z"]),
        helper.make_node("Strange", ["c"], ["s"], domain="my.ops"),
        helper.make_node("Mul", ["s", "z"], ["y"]),
    ]
    source = model(nodes, [value("x", [3])], [value("y", [3]), value("c", [3])])
    source.opset_import.add(domain="my.ops", version=1)
    onnx.save(source, tmp_path / "odd.onnx")
    return tmp_path / "odd.onnx"


def test_check_for_the_web(tmp_path):
    """Of a source, of the step for any runtime, and of the one for the web; a model that nothing loads."""
    onnx.save(mlp(), tmp_path / "m.onnx")
    for target in ("any", "web"):
        done = command(
            *("export-step", "m.onnx", "-o", target, "--loss", "mse", "--optimizer", "adam", "--target", target),
            cwd=tmp_path,
        )
        assert done.returncode == 0, done.stderr
    refused = command(
        "export-step", "m.onnx", "-o", "far", "--loss", "mse", "--optimizer", "sgd", "--target", "phone", cwd=tmp_path
    )
    assert_refused(refused, "target must be one of 'any', 'web', not 'phone'")
    text = '<ir_version: 8, opset_import: ["": 18, "far": 1]> g (float[N] x) => (float[N] y) { y = far.Away (x) }'
    onnx.save(onnx.parser.parse_model(text), tmp_path / "away.onnx")
    for path, code, says in [
        ("web/train.onnx", 0, ["on the processor", "int64", "WASM: runs"]),
        ("any/train.onnx", 1, ["fails", "float64", "target web", "WebGPU: does not run", "WASM: runs"]),
        ("away.onnx", 1, ["no such operator", "far.Away", "WASM: does not run"]),
    ]:
        done = command("check", path, "--target", "web", cwd=tmp_path)
        assert done.returncode == code, done.stdout + done.stderr
        assert all(word in done.stdout for word in says), done.stdout
    assert_refused(command("check", "m.onnx", "--target", "phone", cwd=tmp_path), "target must be 'web', not 'phone'")


def test_check_of_a_model_that_is_not(tmp_path):
    path = _odd(tmp_path)
    done = command("check", path, "--of", "y")
    assert (done.returncode, done.stderr) == (1, "")
    lines = done.stdout.splitlines()
    assert lines[1].split()[:3] == ["my.ops::Strange", "1", "refused"]
    assert "no rule" in lines[1]
    assert "→ [Strange] → Mul → y" in lines[2]
    assert any(line.split()[:3] == ["Sign", "1", "zero"] for line in lines)
    assert lines[-1] == "not differentiable: y with respect to x"
    assert command("check", path, "--of", "c").returncode == 0
    assert_refused(command("grad", path, "--wrt", "x", "--of", "y", "-o", tmp_path / "d.onnx"), "Strange")
    assert not (tmp_path / "d.onnx").exists()


def test_check_looks_into_branches(tmp_path):
    text = """<ir_version: 8, opset_import: ["" : 18, "my.ops" : 1]>
        g (float[3] x, bool c) => (float[3] y) {
          y = If (c) <then_branch = g1 () => (t) { t = my.ops.Strange(x) },
                     else_branch = g2 () => (q) { q = Abs(x) }> }"""
    onnx.save(onnx.parser.parse_model(text), tmp_path / "if.onnx")
    done = command("check", tmp_path / "if.onnx")
    assert (done.returncode, done.stderr) == (1, "")
    rows = {line.split()[0]: line.split()[1:4] for line in done.stdout.splitlines()[1:4]}
    assert rows["Abs"][:2] == ["1", "elementwise"]
    assert rows["my.ops::Strange"] == ["1", "no", "rule"]
    assert "x → [Strange]" in done.stdout


def test_ops_lists_rules_bodies_and_gaps():
    table = command("ops")
    assert (table.returncode, table.stderr) == (0, "")
    listed = json.loads(command("ops", "--json").stdout)
    by_name = {(o["domain"], o["op_type"]): o for o in listed}
    assert by_name["", "MatMul"]["inputs"] == ["A", "B"]
    assert by_name["", "Tanh"]["status"] == "elementwise"
    assert "tanh" in by_name["", "Tanh"]["formula"]
    assert by_name["", "Shape"]["status"] == "zero"
    assert by_name["", "Shape"]["inputs"] == []
    assert by_name["", "LSTM"]["status"] == "lowering"
    assert by_name["", "LSTM"]["inputs"] == ["X", "W", "R", "B", "initial_h", "initial_c", "P"]
    standard = {s.name for s in onnx.defs.get_all_schemas() if s.domain == "" and not s.deprecated}
    assert standard <= {name for _, name in by_name}
    for o in listed:
        assert o["op_type"] in table.stdout
        assert o["formula"] or o["status"] in ("zero", "undefined", "function body", "no rule"), o


# --- errors -----------------------------------------------------------------------------------------


@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["grad", "m.onnx", "--wrt", "ww", "-o", "d.onnx"], "did you mean 'w'?"),
        (["grad", "m.onnx", "--wrt", "w", "--of", "Y", "-o", "d.onnx"], "no value named 'Y'"),
        (["grad", "none.onnx", "--wrt", "w", "-o", "d.onnx"], "there is no file 'none.onnx'"),
        (["grad", ".", "--wrt", "w", "-o", "d.onnx"], "is a directory"),
        (["grad", "empty.onnx", "--wrt", "w", "-o", "d.onnx"], "is empty"),
        (["grad", "cut.onnx", "--wrt", "w", "-o", "d.onnx"], "hint: was it cut off"),
        (["grad", "letter.txt", "--wrt", "w", "-o", "d.onnx"], "letter.txt"),
        (["grad", "m.onnx", "--wrt", "w", "-o", "no/d.onnx"], "there is no directory no"),
        (["grad", "m.onnx", "--wrt", "w", "-o", "."], "is a directory"),
        (["grad", "old.onnx", "--wrt", "w", "-o", "d.onnx"], "hint: export it again"),
        (["check", "cut.onnx"], "cut.onnx"),
        (["check", "m.onnx", "--wrt", "q"], "no value named 'q'"),
    ],
)
def test_bad_input_is_one_clear_message(tmp_path, args, says):
    whole = mlp().SerializeToString()
    old = mlp()
    old.opset_import[0].version = 5
    (tmp_path / "m.onnx").write_bytes(whole)
    (tmp_path / "old.onnx").write_bytes(old.SerializeToString())
    (tmp_path / "empty.onnx").write_bytes(b"")
    (tmp_path / "cut.onnx").write_bytes(whole[:100])
    (tmp_path / "letter.txt").write_text("Dear reader,\n")
    (tmp_path / "d.onnx").write_text("what was there before")
    before = sorted(os.listdir(tmp_path))
    assert_refused(command(*args, cwd=tmp_path), says)
    assert (tmp_path / "d.onnx").read_text() == "what was there before"
    assert sorted(os.listdir(tmp_path)) == before


@pytest.mark.parametrize(
    "args",
    [
        ["grad", "m.onnx", "-o", "d.onnx"],
        ["grad"],
        ["nonsense"],
        ["grad", "m.onnx", "--wrt", "w", "--mode", "x"],
    ],
)
def test_wrong_options(args, tmp_path):
    done = command(*args, cwd=tmp_path)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert done.stderr


def test_a_broken_rule_is_called_a_bug(path):
    script = (
        "import onnxgrad, onnxgrad.cli\n"
        "onnxgrad.rules.elementwise('Tanh')(lambda op, g, x, y: 1 / 0) if 0 else None\n"
        "from onnxgrad.rules import elementwise\n"
        "@elementwise('Tanh')\n"
        "def broken(op, g, x, y):\n    'y = tanh x: nonsense'\n    return op.Cast(g, to=7)\n"
        "onnxgrad.cli.main()\n"
    )
    line = [sys.executable, "-c", script, "grad", str(path), "--wrt", "w", "-o", str(path.parent / "d.onnx")]
    done = subprocess.run(line, capture_output=True, text=True, env=ENV, timeout=120)
    assert done.returncode == 3, done.stderr
    assert done.stderr.startswith("error: the rule of Tanh")
    assert "Traceback" not in done.stderr
    assert not (path.parent / "d.onnx").exists()


def test_interrupted(tmp_path):
    """Ctrl-C in the middle of the work: one line, exit code 130, no half-written file."""
    onnx.save(chain(20_000), tmp_path / "long.onnx")
    line = [sys.executable, "-X", "importtime", "-m", "onnxgrad"]
    line += ["grad", "long.onnx", "--wrt", "x", "-o", "d.onnx"]
    process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path, env=ENV)
    assert process.stderr is not None
    for text in process.stderr:  # the trace of imports tells when the work begins
        if "onnxgrad.cli.path_clashes" in text:
            break
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    _, rest = process.communicate(timeout=60)
    said = [line for line in rest.splitlines() if not line.startswith("import time:")]
    assert process.returncode == 130, rest
    assert said == ["error: interrupted"]
    assert os.listdir(tmp_path) == ["long.onnx"]


@pytest.mark.parametrize("name", COMMANDS)
def test_the_list_of_commands_says_what_each_says_itself(name):
    assert " ".join(one(name).help.split()).startswith(COMMANDS[name])


def test_help_imports_no_command():
    heavy = "numpy", "onnx", "onnx_ir", "sympy", "onnxgrad.model_io"
    code = (
        "import sys; sys.argv = ['onnxgrad', '--help']; import onnxgrad.cli\n"
        "try: onnxgrad.cli.main()\n"
        f"finally: print({{*{heavy}}} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=ENV, timeout=120)
    assert done.stdout.splitlines()[-1] == "set()", done.stdout
    assert "export-step" in done.stdout


# --- what lies in the working directory -------------------------------------------------------------


def not_valid():
    """`Scan` says in words how many of its inputs it scans, over which the onnx package is asked."""
    found = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 21]>
        g (float[2] a, float[3, 2] x) => (float[2] y, float[3, 2] z) {
            y, z = Scan <num_scan_inputs = 1, body = s (float[2] b, float[2] e) => (float[2] c, float[2] o) {
                c = Add (b, e)  o = Exp (c) }> (a, x) }""")
    next(a for a in found.graph.node[0].attribute if a.name == "num_scan_inputs").type = onnx.AttributeProto.STRINGS
    return found


SCRIPT = "import sys; sys.path.remove(''); import onnxgrad.cli; onnxgrad.cli.main()"  # as that of the package


@pytest.mark.sweep(3)
@pytest.mark.parametrize("how", [["-m", "onnxgrad"], ["-u", "-m", "onnxgrad"], ["-c", SCRIPT]], ids=["-m", "-u", "-c"])
def test_modules_in_the_working_directory_are_not_imported(tmp_path, how):
    """Neither by the command nor by what it starts."""
    onnx.save(not_valid(), tmp_path / "m.onnx")
    for name in ("onnx", "google", "numpy", "typer", "rich", "signal", "pathlib", "subprocess", "tempfile"):
        (tmp_path / f"{name}.py").write_text(f"open('executed by {name}', 'w')")
    line = [sys.executable, *how, "check", "m.onnx"]
    done = subprocess.run(line, capture_output=True, text=True, cwd=tmp_path, env=ENV, timeout=120)
    assert not [p.name for p in tmp_path.iterdir() if p.name.startswith("executed")]
    assert_refused(done, "num_scan_inputs")


# --- names that a terminal would obey -----------------------------------------------------------------

EVIL = "w\x1b[2J\x1b]0;t\x07\x9b1m\u202ekcab\u2066\x7f\rerror:\nerror: [/] :smile: [red]"


def _evil():
    """Names of everything, with control characters, marks of direction, and what rich takes for markup."""
    source = mlp()
    rename = {name: name + EVIL for name in ("x", "w", "b", "y")}
    for node in source.graph.node:
        node.name = EVIL
        node.input[:] = [rename.get(n, n) for n in node.input]
        node.output[:] = [rename.get(n, n) for n in node.output]
    for held in (*source.graph.input, *source.graph.output, *source.graph.initializer):
        held.name = rename.get(held.name, held.name)
    source.graph.input[0].type.tensor_type.shape.dim[0].dim_param = EVIL
    return source


def _evil_operator():
    source = _evil()
    source.graph.node[0].op_type += EVIL
    source.graph.node[0].domain = EVIL
    source.opset_import.add(domain=EVIL, version=1)
    return source


def _evil_training():
    source = _evil()
    source.training_info.add().update_binding.add(key="w" + EVIL, value="nowhere" + EVIL)
    return source


def _evil_function():
    source = _evil()
    for a, b in (("f", "g"), ("g", "f")):
        node = helper.make_node(b + EVIL, ["a"], ["c"], domain="d")
        imports = [*source.opset_import, helper.make_opsetid("d", 1)]
        source.functions.append(helper.make_function("d", a + EVIL, ["a"], ["c"], [node], imports))
    source.opset_import.add(domain="d", version=1)
    source.graph.node.append(helper.make_node("f" + EVIL, ["y" + EVIL], ["z"], domain="d"))
    source.graph.output[0].name = "z"
    return source


@pytest.mark.sweep(3)
@pytest.mark.parametrize("make", [_evil, _evil_operator, _evil_training, _evil_function])
def test_names_are_printed_without_what_a_terminal_obeys(tmp_path, monkeypatch, capfd, make):
    monkeypatch.chdir(tmp_path)
    place = os.fsdecode(b"m\x1b[2J\xff.onnx")
    onnx.save(make(), place)
    said = ""
    for args in (
        ["check", place],
        ["check", place, "--wrt", "w" + EVIL, "--of", "none" + EVIL],
        ["grad", place, "--wrt", "w" + EVIL, "-o", "d\x1b.onnx"],
        ["grad", place, "--wrt", "w" + EVIL, "--mode", "jvp", "-o", place],
        ["lower", place, "-o", "d.onnx"],
        ["train", place, "--data", "n\x1b.npz", "-o", "out\x9b.onnx"],
    ):
        with pytest.raises(SystemExit) as done:
            build()(args, prog_name="onnxgrad")
        assert done.value.code in (0, 1, 2)
        out, err = capfd.readouterr()
        assert err.count("error: ") + err.count("warning: ") == 0 or err.startswith(("error: ", "warning: "))
        assert all(line.startswith(("  ", "error: ", "warning: ")) for line in err.splitlines())
        assert sum(line.startswith("error") for line in (out + err).splitlines()) <= 1
        said += out + err
    assert not set(said) & set("\x1b\x07\x9b\u202e\u2066\x7f\r\udcff")
    assert "[/]" in said or make is not _evil


# --- the rest ---------------------------------------------------------------------------------------


def test_version_and_help():
    assert command("--version").stdout == f"onnxgrad {onnxgrad.__version__}\n"
    text = command("--help").stdout
    for name in ("grad", "check", "ops"):
        assert name in text
    script = os.path.join(os.path.dirname(sys.executable), "onnxgrad")
    assert subprocess.run([script, "--version"], capture_output=True, text=True).stdout.startswith("onnxgrad ")


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("onnxgrad gr", ["grad"]),
        ("onnxgrad ex", ["explain", "export-step"]),
        ("onnxgrad train --optim", ["--optimizer"]),
        ("onnxgrad grad m.onnx --wr", ["--wrt"]),
        ("onnxgrad nothing", []),
    ],
)
def test_a_shell_is_told_what_may_come_next(typed, offered):
    asks = {"COMP_WORDS": typed, "COMP_CWORD": str(typed.count(" ")), "_ONNXGRAD_COMPLETE": "complete_bash"}
    assert command(env=asks).stdout.split() == offered
    asks = {"_TYPER_COMPLETE_ARGS": typed, "_ONNXGRAD_COMPLETE": "complete_zsh"}
    assert all(name in command(env=asks).stdout for name in offered)


@pytest.mark.skipif(not shutil.which("bash"), reason="no bash")
def test_completion_in_a_shell(tmp_path):
    for shell in ("bash", "zsh", "fish", "powershell"):
        assert "_ONNXGRAD_COMPLETE" in command("completion", shell).stdout
    refused = command("completion", "bsh")
    assert_refused(refused, "did you mean 'bash'")
    (tmp_path / "onnxgrad").write_text(f'#!/bin/sh\nexec {sys.executable} -m onnxgrad "$@"\n')
    (tmp_path / "onnxgrad").chmod(0o755)
    said = "source <(onnxgrad completion bash); COMP_WORDS=(onnxgrad che) COMP_CWORD=1; _onnxgrad_completion onnxgrad; "
    path = {**ENV, "PATH": f"{tmp_path}:{ENV['PATH']}"}
    done = subprocess.run(["bash", "-c", said + "echo $COMPREPLY"], capture_output=True, text=True, env=path)
    assert done.stdout == "check\n", done.stderr


def test_output_into_a_closed_pipe(path):
    line = f"{sys.executable} -m onnxgrad ops --json | head -1"
    done = subprocess.run(line, shell=True, capture_output=True, text=True, env=ENV, timeout=120)
    assert "Traceback" not in done.stderr
