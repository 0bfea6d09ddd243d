"""The Java host of the page compiles, against the signatures that it uses of ONNX Runtime and of Android's org.json."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "hosts-mobile.md"

#: Signatures as https://onnxruntime.ai/docs/api/java documents them. Bodies are none of theirs.
RUNTIME = {
    "OrtException": "public class OrtException extends Exception {}",
    "OrtEnvironment": """public final class OrtEnvironment implements AutoCloseable {
        public static OrtEnvironment getEnvironment() { return null; }
        public OrtSession createSession(String modelPath) throws OrtException { return null; }
        public void close() {} }""",
    "OrtSession": """public class OrtSession implements AutoCloseable {
        public java.util.Map<String, NodeInfo> getInputInfo() throws OrtException { return null; }
        public Result run(java.util.Map<String, ? extends OnnxTensorLike> inputs) throws OrtException { return null; }
        public void close() throws OrtException {}
        public static class Result implements AutoCloseable {
            public java.util.Optional<OnnxValue> get(String key) { return null; }
            public void close() {} } }""",
    "OnnxTensorLike": "public abstract class OnnxTensorLike implements OnnxValue { public void close() {} }",
    "OnnxTensor": """public class OnnxTensor extends OnnxTensorLike {
        public static OnnxTensor createTensor(OrtEnvironment env, Object data) throws OrtException { return null; }
        public static OnnxTensor createTensor(OrtEnvironment env, java.nio.ByteBuffer data, long[] shape,
            OnnxJavaType type) throws OrtException { return null; }
        public java.nio.FloatBuffer getFloatBuffer() { return null; } }""",
    "OnnxValue": "public interface OnnxValue extends AutoCloseable { void close(); }",
    "NodeInfo": "public class NodeInfo { public ValueInfo getInfo() { return null; } }",
    "ValueInfo": "public interface ValueInfo {}",
    "TensorInfo": "public class TensorInfo implements ValueInfo { public final OnnxJavaType type = null; }",
    "OnnxJavaType": "public enum OnnxJavaType { FLOAT, DOUBLE, INT8, INT16, INT32, INT64, BOOL, STRING }",
}
#: Of https://developer.android.com/reference/org/json, less than the package org.json has: no Iterable, no keySet.
JSON = {
    "JSONException": "public class JSONException extends Exception {}",
    "JSONArray": """public class JSONArray {
        public int length() { return 0; }
        public String getString(int index) throws JSONException { return null; } }""",
    "JSONObject": """public class JSONObject {
        public JSONObject(String json) throws JSONException {}
        public int getInt(String name) throws JSONException { return 0; }
        public String getString(String name) throws JSONException { return null; }
        public JSONObject getJSONObject(String name) throws JSONException { return null; }
        public JSONArray getJSONArray(String name) throws JSONException { return null; }
        public double optDouble(String name, double fallback) { return fallback; }
        public java.util.Iterator<String> keys() { return null; } }""",
}


def test_the_java_host_compiles(tmp_path):
    compiler = shutil.which("javac")
    if compiler is None:
        pytest.skip("no javac")
    for package, classes in {"ai.onnxruntime": RUNTIME, "org.json": JSON}.items():
        folder = tmp_path.joinpath(*package.split("."))
        folder.mkdir(parents=True)
        for name, text in classes.items():
            (folder / f"{name}.java").write_text(f"package {package};\n{text}\n")
    (host,) = re.findall(r"```java\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    (tmp_path / "Host.java").write_text(host)
    done = subprocess.run(
        [compiler, "--release", "17", "-Xlint:all,-try,-serial", "-Werror", "-sourcepath", ".", "Host.java"],
        cwd=tmp_path, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_the_pages_say_what_was_not_compiled():
    swift = PAGE.with_name("hosts-swift.md").read_text(encoding="utf-8")
    assert "The Kotlin program was not compiled" in PAGE.read_text(encoding="utf-8")
    assert "The program was not compiled" in swift
    assert "The C# program was not compiled" in PAGE.with_name("hosts.md").read_text(encoding="utf-8")
    assert ".path()" not in swift, "which is percent-encoded in Swift"
