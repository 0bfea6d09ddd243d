"""Each rank of `test_replicas`: a hundred steps of a `Trainer`, and the bits of its state after them."""

import sys

from onnxgrad.runtime import Options
from onnxgrad.training import Trainer
from onnxgrad.training.parallel.ranks import digest
from tests.training.models import blobs, classifier

trainer = Trainer(
    classifier(),
    loss="cross_entropy",
    optimizer="adam",
    learning_rate=0.02,
    clip_norm=1.0,
    shard_optimizer="shard" in sys.argv,
    options=Options(threads=1, target="portable"),
)
history = trainer.fit(blobs(90), epochs=17, batch_size=16, seed=3, progress=False)
sys.stdout.write(f"after {trainer.step_count} steps {digest(trainer.state())} {history.epochs[-1]['loss']!r}\n")
sys.stdout.flush()
