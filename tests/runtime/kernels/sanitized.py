"""``python -m tests.runtime.kernels.sanitized``: the tests of kernels that watch each access to memory.

They are built by the C compiler of this machine with AddressSanitizer and UndefinedBehaviorSanitizer, as a library of
its own; an error that these find ends the tests. Tensors come one by one from the allocator instead of the runtime's
arena, so that each has its borders (see ``conftest.py``). Where there is no compiler, or it brings no sanitizers,
nothing is run. Further arguments are those of pytest.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tools import build_kernels

SANITIZED = "ONNXGRAD_TESTS_SANITIZED"
_FLAGS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer", "-g")


def environment(folder: Path) -> dict[str, str] | None:
    """The environment of a process that runs kernels under sanitizers; None without a compiler for them."""
    compiler = next(filter(None, map(shutil.which, ("gcc", "cc"))), None)
    if compiler is None or sys.platform != "linux":
        return None
    libraries = []
    for name in ("libasan.so", "libubsan.so", "libstdc++.so.6"):  # ONNX Runtime throws, which the first one watches
        asked = [compiler, f"-print-file-name={name}"]
        found = Path(subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip())
        if not found.is_absolute():
            return None
        libraries.append(str(found))
    library = folder / "sanitized.so"
    build_kernels.build_library([compiler], ["-march=native", "-ffp-contract=fast", *_FLAGS], library)
    return {
        "ONNXGRAD_LIBRARY": str(library),
        "LD_PRELOAD": " ".join(libraries),
        "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1:detect_stack_use_after_return=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        SANITIZED: "1",
    }


def main() -> int:
    """Run the tests; their exit code."""
    with tempfile.TemporaryDirectory(prefix="sanitized-") as folder:
        more = environment(Path(folder))
        if more is None:
            print("skipped: no C compiler with AddressSanitizer here")
            return 0
        chosen = sys.argv[1:] or [str(Path(__file__).parent), "-m", "not torch"]
        command = [sys.executable, "-m", "pytest", "-q", "-n", "auto", "-p", "no:cacheprovider", *chosen]
        return subprocess.run(command, env={**os.environ, **more}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
