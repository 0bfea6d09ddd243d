"""Models on the Hugging Face Hub: read by its cache, uploaded by its client."""

import os
import sys

import numpy as np
import onnx
import pytest

import onnxgrad
from onnxgrad.errors import BadInput
from onnxgrad.model_io import load_model
from onnxgrad.model_io.hub import HubFile
from tests.commands import command
from tests.models import mlp

huggingface_hub = pytest.importorskip("huggingface_hub", reason="no huggingface_hub")


@pytest.fixture
def cache(tmp_path):
    """A cache as huggingface_hub lays it out: links to blobs. It has a model with its weights in another file."""
    onnx.save(mlp(), tmp_path / "m.onnx", save_as_external_data=True, location="m.onnx_data", size_threshold=0)
    home = tmp_path / "home"
    held = home / "hub" / "models--org--net"
    commit = "0" * 40
    snapshot = held / "snapshots" / commit / "onnx"
    for folder in (held / "blobs", held / "refs", snapshot):
        folder.mkdir(parents=True)
    (held / "refs" / "main").write_text(commit)
    for name in ("m.onnx", "m.onnx_data"):
        (tmp_path / name).rename(held / "blobs" / name)
        (snapshot / name).symlink_to(f"../../../blobs/{name}")
    return home


def test_the_command_reads_the_cache_offline(cache):
    env = {**os.environ, "HF_HOME": str(cache), "HF_HUB_OFFLINE": "1"}
    done = command("info", "hf://org/net/onnx/m.onnx", env=env)
    assert done.returncode == 0, done.stderr
    assert "float32[N, 3]" in done.stdout
    done = command("info", "hf://org/net/onnx/other.onnx", env=env)
    assert done.returncode == 2
    assert done.stderr.startswith("error: cannot fetch hf://org/net/onnx/other.onnx: ")


def test_weights_in_other_files_are_fetched_as_well(cache, monkeypatch):
    asked = []

    def download(repository, file, revision=None):
        asked.append((repository, file, revision))
        return str(cache / "hub" / "models--org--net" / "snapshots" / ("0" * 40) / file)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    model = load_model("hf://org/net@v2/onnx/m.onnx")
    assert asked == [("org/net", "onnx/m.onnx", "v2"), ("org/net", "onnx/m.onnx_data", "v2")]
    (w,) = (t for t in mlp().graph.initializer if t.name == "w")
    assert np.array_equal(model.graph.initializers["w"].const_value.numpy(), onnx.numpy_helper.to_array(w))
    assert onnxgrad.Function("hf://org/net@v2/onnx/m.onnx")(np.zeros((1, 3), np.float32)).shape == (1, 2)


@pytest.mark.parametrize("path", ["hf://org/m.onnx", "hf://org/net/../m.onnx", "hf:///org/net"])
def test_malformed_paths(path):
    with pytest.raises(BadInput, match="not written as hf://org/repo/"):
        load_model(path)


def test_weights_outside_of_the_folder_are_not_fetched():
    with pytest.raises(BadInput, match="outside of its folder"):
        HubFile("org/net", "onnx/m.onnx").beside("../secret")


def test_a_model_is_uploaded_with_its_weights(monkeypatch, tmp_path):
    calls = []

    class Client:
        def create_repo(self, name, **settings):
            calls.append((name, settings))

        def upload_folder(self, **settings):
            calls.append({f: onnx.load(f"{settings['folder_path']}/{f}") for f in os.listdir(settings["folder_path"])})
            calls.append((settings["repo_id"], settings["path_in_repo"]))
            return "https://hub/commit"

    monkeypatch.setattr(huggingface_hub, "HfApi", Client)
    assert onnxgrad.push_to_hub(mlp(), "hf://org/net/onnx/m.onnx", private=True) == "https://hub/commit"
    assert calls[0] == ("org/net", {"private": True, "exist_ok": True})
    assert calls[1]["m.onnx"].graph.initializer == mlp().graph.initializer
    assert calls[2] == ("org/net", "onnx")
    with pytest.raises(BadInput, match="not written as hf://org/repo/"):
        onnxgrad.push_to_hub(mlp(), "org/net/m.onnx")


def test_without_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(BadInput, match=r"need huggingface_hub: pip install 'onnxgrad\[hub\]'"):
        load_model("hf://org/net/m.onnx")
