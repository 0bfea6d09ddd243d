"""Runtimes for a graph: one small protocol, ONNX Runtime with resident state, and the reference evaluator."""

from onnxgrad.runtime.options import Options
from onnxgrad.runtime.peak_memory import measured_peak
from onnxgrad.runtime.protocol import Machine, Slot, StepGraph
from onnxgrad.runtime.reference import ReferenceSession
from onnxgrad.runtime.resident import Resident, StepRunner, share
from onnxgrad.runtime.session import Session

__all__ = [
    "Machine",
    "Options",
    "ReferenceSession",
    "Resident",
    "Session",
    "Slot",
    "StepGraph",
    "StepRunner",
    "measured_peak",
    "share",
]
