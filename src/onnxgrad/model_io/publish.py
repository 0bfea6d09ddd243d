"""Upload models to the Hugging Face Hub."""

from __future__ import annotations

import tempfile
from pathlib import Path, PurePosixPath

import onnx
import onnx_ir as ir

from onnxgrad.errors import BadInput
from onnxgrad.keywords import check_keywords
from onnxgrad.model_io.hub import HubFile, import_hub
from onnxgrad.model_io.open import AnyModel
from onnxgrad.model_io.read import load_model, read_proto
from onnxgrad.model_io.save import save_model


@check_keywords
def push_to_hub(model: AnyModel, path: str, *, private: bool | None = None, message: str | None = None) -> str:
    """Upload `model`, with its weights, to the Hugging Face Hub.

    Args:
        model: a path, an ``onnx.ModelProto`` or an ``onnx_ir.Model``.
        path: ``hf://org/repo/folder/model.onnx``; the repository is created if there is none.
        private: visibility of a repository that is created. Default: that of the organization.
        message: of the commit.

    Returns:
        The address of the commit.

    Raises:
        BadInput: the path is not of this form, huggingface_hub is missing, or the Hub refuses the upload.
    """
    target = HubFile.of(path)
    if target is None:
        raise BadInput(f"{path!r} is not written as hf://org/repo/model.onnx")
    hub, place = import_hub(), PurePosixPath(target.file)
    opened = model if isinstance(model, ir.Model) else None
    if opened is None:
        opened = read_proto(model) if isinstance(model, onnx.ModelProto) else load_model(model)  # type: ignore[arg-type]
    with tempfile.TemporaryDirectory() as folder:
        save_model(opened, Path(folder) / place.name)
        client = hub.HfApi()
        try:
            client.create_repo(target.repository, private=private, exist_ok=True)
            done = client.upload_folder(
                repo_id=target.repository,
                folder_path=folder,
                path_in_repo=str(place.parent),
                revision=target.revision,
                commit_message=message or f"Upload {place.name} with onnxgrad",
            )
        except (OSError, ValueError, hub.errors.HfHubHTTPError) as error:
            raise BadInput(f"cannot upload {target}: {str(error).strip() or type(error).__name__}") from error
    return str(done)
