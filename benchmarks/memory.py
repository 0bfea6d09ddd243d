"""The resident memory of this process."""

from __future__ import annotations

import resource
from pathlib import Path

_STATUS = Path("/proc/self/status")


def resident(which: str = "VmHWM") -> int:
    """Bytes: "VmHWM", the peak so far, or "VmRSS", those now; outside Linux always the peak.

    On Linux ``ru_maxrss`` would include the process that started this one.
    """
    if not _STATUS.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(which))
    return int(line.split()[1]) * 1024
