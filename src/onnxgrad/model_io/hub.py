"""Models on the Hugging Face Hub: ``hf://org/repo/folder/model.onnx``, by the package huggingface_hub.

Its cache, its token and its environment variables (``HF_HOME``, ``HF_HUB_OFFLINE``, …) count. A revision is written
``hf://org/repo@revision/model.onnx``.
"""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, Self

from onnxgrad.errors import BadInput, needs_package

#: A path object has one slash of the two.
_FORM = re.compile(r"hf:/{1,2}([\w.-]+/[\w.-]+)(?:@([^/]+))?/(.+)")


class HubFile(NamedTuple):
    """A file of a repository.

    Attributes:
        repository: ``org/repo``.
        file: its path in the repository.
        revision: a branch, tag or commit; None: the main branch.
    """

    repository: str
    file: str
    revision: str | None = None

    @classmethod
    def of(cls, path: str | os.PathLike) -> Self | None:
        """The file that `path` names; None for a path of this machine. Raises BadInput for a malformed one."""
        text = os.fspath(path)
        if not isinstance(text, str) or not text.startswith("hf:/"):
            return None
        found = _FORM.fullmatch(text.replace("\\", "/"))
        if found is None or ".." in found[3].split("/"):
            raise BadInput(f"{text!r} is not written as hf://org/repo/model.onnx")
        return cls(found[1], found[3], found[2])

    def beside(self, location: str) -> Self:
        """The file at `location`, relative to the folder of this one. Raises BadInput if it is outside of it."""
        if PurePosixPath(location).is_absolute() or ".." in PurePosixPath(location).parts:
            raise BadInput(f"{self} keeps weights in {location!r}, outside of its folder")
        return self._replace(file=str(PurePosixPath(self.file).parent / location))

    def fetch(self) -> Path:
        """The file in the cache, downloaded if it is not there yet.

        Raises:
            BadInput: huggingface_hub is missing, or there is no such file; offline, none in the cache.
        """
        hub = import_hub()
        try:
            return Path(hub.hf_hub_download(self.repository, self.file, revision=self.revision))
        except (OSError, ValueError, hub.errors.HfHubHTTPError) as error:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise BadInput(f"cannot fetch {self}: {reason}") from error

    def __str__(self) -> str:
        return f"hf://{self.repository}{f'@{self.revision}' if self.revision else ''}/{self.file}"


def import_hub() -> Any:
    """The package huggingface_hub. Raises BadInput if it is missing."""
    with needs_package("paths that begin with hf:// need huggingface_hub", "hub"):
        import huggingface_hub
    return huggingface_hub
