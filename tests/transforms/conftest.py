"""Everything here holds of both forms that many directions take: a stack, and a Scan."""

import pytest

from onnxgrad.batching import directions


@pytest.fixture(params=["stack", "scan"], autouse=True)
def form(request, monkeypatch):
    if request.param == "scan":
        monkeypatch.setattr(directions, "MOST_ELEMENTS", -1)
    return request.param
