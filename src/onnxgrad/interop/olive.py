"""A pass of Olive that trains a model, whose result is a plain ``.onnx`` file for the next passes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from olive.hardware import AcceleratorSpec
from olive.model import ONNXModelHandler
from olive.model.utils import resolve_onnx_path
from olive.package_config import OlivePackageConfig
from olive.passes import Pass
from olive.passes.pass_config import BasePassConfig, PassConfigParam

from onnxgrad.training import train


class OnnxGradTraining(Pass):
    """Train the model on `data`, with `settings`, the keywords of `onnxgrad.train`."""

    @classmethod
    def _default_config(cls, accelerator_spec: AcceleratorSpec) -> dict[str, PassConfigParam]:
        return {
            "data": PassConfigParam(type_=str, required=True, description="Training data: a file or a folder."),
            "settings": PassConfigParam(type_=dict, default_value={}, description="Keywords of onnxgrad.train."),
        }

    def _run_for_config(
        self, model: ONNXModelHandler, config: type[BasePassConfig], output_model_path: str
    ) -> ONNXModelHandler:
        path = resolve_onnx_path(output_model_path, Path(model.model_path).name)
        settings: dict[str, Any] = {"progress": False, **config.settings}
        train(model.model_path, config.data, output=path, **settings)
        return ONNXModelHandler(path)


def package_config() -> dict[str, Any]:
    """Olive's own passes and `OnnxGradTraining`, for ``olive.workflows.run(…, package_config=)``."""
    found: dict[str, Any] = json.loads(Path(OlivePackageConfig.get_default_config_path()).read_text())
    any_of = {key: ["*"] for key in ("supported_providers", "supported_accelerators", "supported_precisions")}
    place = f"{__name__}.{OnnxGradTraining.__name__}"
    found["passes"][OnnxGradTraining.__name__] = {"module_path": place, **any_of}
    return found
