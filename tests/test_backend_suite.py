"""The whole backend test suite of the onnx package through onnxgrad.backend: what does not pass, and why.

`backend_limits.json` lists every test that stock ONNX Runtime does not pass, by reason. A test that is not in it
passes; one that is in it fails for as long as it is there, so a newer runtime shows as well. Write it anew with
``ONNXGRAD_GOLDEN=update``; tests that fail for no reason of the table below have to be looked at.
"""

from __future__ import annotations

import json
import os
import re
import unittest
import warnings
from pathlib import Path

import onnx.backend.test
import pytest
from onnx.backend.test.runner import BackendIsNotSupposedToImplementIt

import onnxgrad.backend

LIMITS = Path(__file__).with_name("backend_limits.json")
PAGE = Path(__file__).parents[1] / "docs" / "training-specification.md"

#: What the runtime says when it refuses a model, or a test when it fails, by reason; the first that fits counts.
REASONS = {
    "newer than the runtime: opset above 26 or IR above 13": r"(?i)unsupported model ir version|opset \d+ is under",
    "an operator that the runtime does not know": r"is not a registered function/op",
    "a newer form of an operator than the runtime has": r"This is an invalid model|Type Error",
    "an opset below 7, for which the runtime has no kernels": r"implementation for (\w+)\([16]\)",
    "no kernel on the CPU, or none for the type": r"Could not find an implementation|Failed to find kernel",
    "a layout that the kernel lacks": r"Exception during initialization",
    "the kernel fails": r"ONNX Runtime failed|ONNXRuntimeError|onnxruntime::",
    "other random numbers": r"test_training_dropout",
    "rounding: zeros are wanted to 1e-7, float16 to its last digit": r"test_(dft|stft|attention_4d_causal_fp16)",
    "other results": r"test_(resize_downsample|maxunpool_export|attention_4d_with_past|loop16_seq_none)",
}


class Listening(onnxgrad.backend.Backend):
    """Keeps what is refused, which the suite takes for passed."""

    refused = ""

    @classmethod
    def prepare(cls, model, device="CPU", **kwargs):
        try:
            return super().prepare(model, device, **kwargs)
        except BackendIsNotSupposedToImplementIt as e:
            Listening.refused = str(e)
            raise


def outcome(case: unittest.TestCase) -> str:
    """Why a test of the suite does not pass; empty if it does."""
    Listening.refused, result = "", unittest.TestResult()
    case.run(result)
    said = [text for _, text in result.errors + result.failures + result.skipped]
    return f"{Listening.refused} {said[0] if said else ''}" if said or Listening.refused else ""


OURS = re.compile(r"test_(gradient_of|adagrad|adam|momentum|nesterov|nllloss|sce_)")


@pytest.fixture(scope="module", params=[10, pytest.param(1, marks=pytest.mark.complete)], ids=["a tenth", "all"])
def found(request: pytest.FixtureRequest) -> dict[str, str]:
    """Per test of the suite, why it does not pass: each n-th, and all of training."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cases = onnx.backend.test.BackendTest(Listening, __name__).test_cases
        held = {
            n.removesuffix("_cpu"): of(n) for of in cases.values() for n in dir(of) if re.fullmatch("test_.*_cpu", n)
        }
        names = sorted(held)
        return {n: outcome(held[n]) for n in sorted({*names[:: request.param], *filter(OURS.match, names)})}


def reason(name: str, said: str) -> str:
    return next((why for why, pattern in REASONS.items() if re.search(pattern, f"{name} {said}")), said)


def test_what_does_not_pass(found):
    limits: dict[str, list[str]] = {why: [] for why in REASONS}
    for name, said in sorted(found.items()):
        if said and "strnorm" not in name:  # which depends on the locales of the machine
            limits.setdefault(reason(name, said), []).append(name)
    if os.environ.get("ONNXGRAD_GOLDEN") == "update" and len(found) > 2000:
        LIMITS.write_text(json.dumps(limits, indent=1) + "\n")
    known = json.loads(LIMITS.read_text())
    assert limits == {why: [name for name in names if name in found] for why, names in known.items()}
    assert list(limits) == list(REASONS), "tests that fail for another reason"


def test_all_of_training_passes(found):
    names = [name for name in found if OURS.match(name)]
    assert len(names) > 70
    assert not [name for name in names if found[name]]


def test_the_page_counts_them():
    limits, page = json.loads(LIMITS.read_text()), PAGE.read_text()
    for why, names in limits.items():
        assert f"| {why} | {len(names)} |" in page
