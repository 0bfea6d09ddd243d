"""A dozen of the zoo's architectures, held to PyTorch; `python -m tests.zoo` holds all."""

import importlib.util
import re

import pytest

for package in ("torch", "timm", "torchvision", "transformers"):  # not imported: torchvision needs its stub first
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"could not import {package!r}", allow_module_level=True)

from tests.zoo.architectures import architectures  # noqa: E402
from tests.zoo.proof import prove  # noqa: E402

pytestmark = pytest.mark.torch

DOZEN = [
    ("timm/mobilenetv4_conv_small_050", "torchscript"),
    ("timm/vit_tiny_patch16_224", "torchscript"),
    ("transformers/DebertaV2", "torchscript"),
    ("torchvision/squeezenet1_1", "torchscript"),
    ("transformers/Bert", "torchscript"),
    ("transformers/GPT2", "torchscript"),
    ("transformers/Llama", "torchscript"),
    ("transformers/T5", "torchscript"),
    ("transformers/XLNet", "torchscript"),
    ("transformers/ModernBert", "torchscript"),
    ("transformers/Bert", "dynamo"),
    ("transformers/Llama", "dynamo"),
]
ALL = {f"{a.package}/{a.name}": a for a in architectures()}


@pytest.mark.parametrize(("name", "exporter"), DOZEN, ids=["-".join(pair) for pair in DOZEN])
def test_held_to_pytorch(name, exporter):
    outcome = prove(ALL[name], exporter)
    assert outcome.verdict == "right", outcome
    assert {"gradients", "second order", "training"} <= {re.sub(r" \(.*", "", what) for what in outcome.proven}, outcome
    assert "leaves out" not in outcome.remark, outcome
    assert "trains " not in outcome.remark or "stands for them" in outcome.remark, outcome
