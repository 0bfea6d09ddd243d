"""Statements of the migration pages on onnxruntime-training, against what its last release computed.

`ort_training.json` holds losses and learning rates of onnxruntime-training-cpu 1.19.2 (onnx 1.16.2, numpy 1.26.4) on
`forward` and `data`: twelve steps of 16 rows each at the rate 0.05, from the artifacts that its tools make.
"""

import json
from pathlib import Path

import numpy as np
import onnx
import pytest

from onnxgrad.runtime import StepRunner
from onnxgrad.training import Schedule, Trainer, attach, compile_step

PAGES = sorted((Path(__file__).parents[2] / "docs").glob("migration*.md"))
MEASURED = json.loads(Path(__file__).with_name("ort_training.json").read_text())

SAME = {
    "CrossEntropyLoss, AdamW": {"optimizer": "adamw:eps=1e-6,decay=0,convention=onnx"},
    "CrossEntropyLoss, SGD": {"optimizer": "sgd"},
    "CrossEntropyLoss, SGD, ClipGradNorm(0.5)": {"optimizer": "sgd", "clip_norm": 0.5},
    "MSELoss, SGD": {"optimizer": "sgd", "loss": "mse", "labels": "target"},
    "L1Loss, SGD": {"optimizer": "sgd", "loss": "l1", "labels": "target"},
    "BCEWithLogitsLoss, SGD": {"optimizer": "sgd", "loss": "bce_with_logits", "labels": "target"},
}

#: The public names of the release: arguments of generate_artifacts, classes, methods, blocks; C++; JavaScript.
NAMES = """
requires_grad frozen_params LossType.MSELoss LossType.CrossEntropyLoss LossType.BCEWithLogitsLoss LossType.L1Loss
OptimType.AdamW OptimType.SGD artifact_directory prefix ort_format custom_op_library additional_output_names
nominal_checkpoint loss_input_names
load_checkpoint save_checkpoint include_optimizer_state parameters properties .data .grad .requires_grad
module.train module.eval lazy_reset_grad get_contiguous_parameters get_parameters_size copy_buffer_to_parameters
export_model_for_inferencing input_names output_names session_options device=
optimizer.step set_learning_rate get_learning_rate LinearLRScheduler scheduler.step set_seed
onnxblock.base empty_base custom_op_library load_checkpoint_to_model ForwardBlock TrainingBlock to_model_proto
MSELoss CrossEntropyLoss BCEWithLogitsLoss L1Loss optim.AdamW optim.SGD ClipGradNorm
Add Sub Mul Div Pow ReduceMean ReduceSum Sigmoid Log Neg Abs Constant SequenceConstruct ReduceAllL2 Clip PassThrough
InputLike LabelEncoder Cast Linear
LoadCheckpoint LoadCheckpointFromBuffer SaveCheckpoint AddProperty GetProperty UpdateParameter GetParameter
TrainStep EvalStep OptimizerStep LazyResetGrad SetLearningRate GetLearningRate RegisterLinearLRScheduler SchedulerStep
ExportModelForInferencing ToBuffer FromBuffer GetParametersSize InputNames OutputNames SetSeed
TrainingSession.create runTrainStep runOptimizerStep lazyResetGrad runEvalStep getContiguousParameters
loadParametersBuffer trainingInputNames
ORTModule FusedAdam FP16_Optimizer AdamConfig LambConfig SGDConfig LinearWarmupLRScheduler
"""


def forward():
    model = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["": 17]>
        forward (float[N, 4] input) => (float[N, 3] output) {
            h = Gemm (input, fc1_weight, fc1_bias)
            r = Relu (h)
            output = Gemm (r, fc2_weight, fc2_bias)
        }""")
    shapes = {"fc1_weight": (4, 8), "fc1_bias": (8,), "fc2_weight": (8, 3), "fc2_bias": (3,)}
    for k, (name, shape) in enumerate(shapes.items()):
        array = np.sin(1.0 + k + 7 * np.arange(np.prod(shape))).reshape(shape).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return model


def data():
    labels = np.arange(96) * 5 % 3
    noise = np.sin(np.arange(384) * 11.0).reshape(96, 4)
    target = (np.cos(np.arange(288) * 3.0) > 0).reshape(96, 3)
    return {
        "input": (noise + 2 * np.eye(3, 4)[labels]).astype(np.float32),
        "labels": labels,
        "target": target.astype(np.float32),
    }


def losses(**settings):
    # the weights are sines of their index, which a step leaves out as a table unless it is told to train all
    step = compile_step(attach(forward(), learning_rate=0.05, trainable=["all"], **settings))
    runner, rows = StepRunner(step), data()
    parts = [slice(16 * (k % 6), 16 * (k % 6) + 16) for k in range(12)]
    found = [float(runner.step({n: rows[n][part] for n in step.batch})[step.loss]) for part in parts]
    trainer = Trainer(step)
    trainer.machine.load_state(runner.state())
    return [*found, trainer.evaluate(rows)["loss"]]


@pytest.mark.parametrize("name", SAME)
def test_what_the_page_gives_for_it_computes_the_same(name):
    np.testing.assert_allclose(losses(**SAME[name]), MEASURED["losses"][name], rtol=1e-5)


def test_its_decay_comes_after_the_step():
    here = losses(optimizer="adamw:eps=1e-6,decay=0.1,convention=onnx")
    there = np.array(MEASURED["losses"]["CrossEntropyLoss, AdamW(weight_decay=0.1)"])
    assert 1e-4 < np.abs(here / there - 1).max() < 0.05


def test_its_scheduler_takes_the_two_counts_in_the_other_order():
    """LinearLRScheduler(optimizer, 3, 10, 0.1) and (optimizer, 10, 3, 0.1): the rates before each step."""
    warm, decay = MEASURED["rates"]["3, 10"], MEASURED["rates"]["10, 3"]
    schedule = Schedule.of("linear:total=7,warmup=3")
    np.testing.assert_allclose(decay[3:], [0.1 * schedule(k) for k in range(3, len(decay))], atol=1e-6)
    np.testing.assert_allclose(decay[1:4], [0.1 * schedule(k) for k in range(3)], atol=1e-6)
    np.testing.assert_allclose(warm[:10], 0.01 * np.arange(10), atol=1e-6)
    assert not any(warm[10:])


def test_every_name_is_on_a_page():
    text = "".join(page.read_text() for page in PAGES)
    assert [name for name in NAMES.split() if name not in text] == []
