"""Wheels for platforms: the pure wheel, and in it the kernels as shared libraries, compiled across by ``zig cc``.

    python tools/platform_wheels.py DIST [TAG ...]

puts a wheel for each platform (or those named) beside the pure wheel in DIST. The system that it runs on does not
matter. Needs the packages ``wheel`` and ``ziglang`` (``pip install 'onnxgrad[wheels]'``).
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import build_kernels

from onnxgrad import __version__

KERNELS = Path("onnxgrad", "runtime", "kernels")


@dataclass(frozen=True)
class Platform:
    """A platform: its name for zig, the suffix of its shared libraries, and the flags for each kind of processor."""

    target: str
    suffix: str
    processors: dict[str, tuple[str, ...]]


X86 = {"x86-64": ("-mcpu=x86_64",), "x86-64-v3": ("-mcpu=x86_64_v3",)}
V4 = {"x86-64-v4": ("-mcpu=x86_64_v4", "-mprefer-vector-width=512")}
#: By the tag of the wheel. The libraries of Windows have only been compiled, never run.
PLATFORMS = {
    "manylinux_2_28_x86_64": Platform("x86_64-linux-gnu.2.28", "so", X86 | V4),
    "manylinux_2_28_aarch64": Platform("aarch64-linux-gnu.2.28", "so", {"aarch64": ("-mcpu=generic",)}),
    "macosx_11_0_arm64": Platform("aarch64-macos.11.0", "dylib", {"aarch64": ("-mcpu=apple_m1",)}),
    "win_amd64": Platform("x86_64-windows-gnu", "dll", X86),
}


def compiled(platform: Platform, sources: Path, folder: Path) -> None:
    """Put the libraries of a platform, made of the files in `sources`, into `folder`."""
    folder.mkdir()
    files = sorted(map(str, sources.glob("*.c")))
    flags = [f for f in build_kernels.FLAGS if f != "-fPIC" or platform.suffix != "dll"]
    for kind, processor in platform.processors.items():
        place = folder / build_kernels.processors.name_library(sources, kind, platform.suffix)
        command = [sys.executable, "-m", "ziglang", "cc", "-target", platform.target, *processor, *flags]
        command += ["-ffp-contract=fast-honor-pragmas", "-fno-sanitize=all", "-s", *files, "-lm", "-o", str(place)]
        subprocess.run(command, check=True)
        for other in folder.iterdir():  # for Windows, a library to link with and its names
            if other.suffix != f".{platform.suffix}":
                other.unlink()


def wheel_for(tag: str, pure: Path, into: Path) -> None:
    """Write the wheel for the platform with this tag, of the pure one."""
    wheel = [sys.executable, "-m", "wheel"]
    with tempfile.TemporaryDirectory() as place:
        subprocess.run([*wheel, "unpack", str(pure), "--dest", place], check=True)
        (tree,) = Path(place).iterdir()
        compiled(PLATFORMS[tag], tree / KERNELS / "source", tree / KERNELS / build_kernels.FOLDER.name)
        (said,) = tree.glob("*.dist-info/WHEEL")
        text = said.read_text().replace("Root-Is-Purelib: true", "Root-Is-Purelib: false")
        said.write_text(text.replace("Tag: py3-none-any", f"Tag: py3-none-{tag}"))
        subprocess.run([*wheel, "pack", str(tree), "--dest-dir", str(into)], check=True)


def main(dist: str, *tags: str) -> None:
    """Write the wheels that the command line asks for."""
    pure = Path(dist, f"onnxgrad-{__version__}-py3-none-any.whl")
    for tag in tags or PLATFORMS:
        wheel_for(tag, pure, Path(dist))


if __name__ == "__main__":
    main(*sys.argv[1:])
