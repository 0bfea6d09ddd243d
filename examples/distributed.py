"""A classifier of handwritten digits, trained by as many processes as there are: one, or those of a launcher.

    pip install 'onnxgrad[demo,torch]'
    python examples/distributed.py
    torchrun --standalone --nproc-per-node 2 examples/distributed.py
    mpiexec -n 2 python examples/distributed.py      # with onnxgrad[demo,mpi]

The batch is that of all ranks together, and each takes its part of it. Accuracies differ a little all the same, since
BatchNormalization takes the statistics of the rows of its rank.
"""

from onnxgrad.demo import MODEL, digits
from onnxgrad.training import Trainer


def main(epochs: int = 4) -> tuple[Trainer, dict[str, float]]:
    """The trainer of this process, and what all of them measure together."""
    train, test = digits()
    trainer = Trainer(MODEL, loss="cross_entropy", optimizer="adam", learning_rate=3e-3)
    trainer.fit(train, epochs=epochs, batch_size=64, progress=False)
    return trainer, trainer.evaluate(test)


if __name__ == "__main__":
    trainer, found = main()
    if trainer.is_writer:
        size = 1 if trainer.ranks is None else trainer.ranks.size
        print(f"{size} rank(s): loss {found['loss']:.4f}, accuracy {found['accuracy']:.1%} on unseen digits")
