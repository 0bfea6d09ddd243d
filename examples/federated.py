"""Four clients, each of which has only two or three of the ten digits, learn all ten; no image leaves its client.

Flower brings the weights to the clients and takes their means (FedAvg, McMahan et al. 2017); a client trains them on
its own images for an epoch, with a `Trainer`. Of the state of a step, only what the model itself holds travels:
weights, and running statistics of BatchNormalization, without which a mean of weights is of little use.

    pip install 'onnxgrad[demo]' 'flwr[simulation]'     # in an environment of its own
    python examples/federated.py
"""

from functools import cache

import numpy as np
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

from onnxgrad import Options
from onnxgrad.demo import MODEL, digits
from onnxgrad.training import Trainer

SHARES = ((0, 1, 2), (3, 4, 5), (6, 7), (8, 9))  # the digits of each client


@cache
def trainer() -> Trainer:
    """Of this process; clients take turns on it."""
    return Trainer(MODEL, loss="cross_entropy", optimizer="sgd", learning_rate=0.1, options=Options(threads=1))


def names() -> list[str]:
    """The names of the exchanged tensors."""
    state = trainer().step.state.values()
    return [t.name for t in state if t.kind in ("parameter", "statistic") and t.initial.dtype.is_floating_point()]


def load(arrays: list[np.ndarray]) -> Trainer:
    """The trainer with these weights, and everything else as at first."""
    found = trainer()
    found.machine.load_state(found.initial | dict(zip(names(), arrays)))
    return found


def share(client: int) -> dict[str, np.ndarray]:
    """The images of one client."""
    images, _ = digits()
    rows = np.isin(images["labels"], SHARES[client])
    return {name: array[rows] for name, array in images.items()}


client_app = ClientApp()


@client_app.train()
def train(message: Message, context: Context) -> Message:
    """One epoch on the images of this client."""
    images = share(int(context.node_config["partition-id"]))
    found = load(message.content["arrays"].to_numpy_ndarrays())
    history = found.fit(images, batch_size=64, seed=int(message.content["config"]["server-round"]))
    state = found.state()
    content = {
        "arrays": ArrayRecord([state[name] for name in names()]),
        "metrics": MetricRecord({"loss": history.epochs[-1]["loss"], "num-examples": len(images["labels"])}),
    }
    return Message(content=RecordDict(content), reply_to=message)


def main(rounds: int = 15) -> tuple[list[float], float]:
    """Accuracies on digits that no client has seen: after every round, and of the first client left to itself."""
    _, test = digits()
    found: list[float] = []

    def measured(_: int, arrays: ArrayRecord) -> MetricRecord:
        found.append(load(arrays.to_numpy_ndarrays()).evaluate(test)["accuracy"])
        return MetricRecord({"accuracy": found[-1]})

    server_app = ServerApp()

    @server_app.main()
    def serve(grid: Grid, context: Context) -> None:
        first = ArrayRecord([trainer().initial[name] for name in names()])
        strategy = FedAvg(fraction_evaluate=0.0, min_available_nodes=len(SHARES))
        strategy.start(grid, first, num_rounds=rounds, evaluate_fn=measured)

    run_simulation(server_app, client_app, num_supernodes=len(SHARES))
    alone = load([trainer().initial[name] for name in names()])
    alone.fit(share(0), epochs=rounds, batch_size=64)
    return found[1:], alone.evaluate(test)["accuracy"]


if __name__ == "__main__":
    import federated  # as a module, which the processes of the clients can import

    together, alone = federated.main()
    print(f"after {len(together)} rounds: {together[-1]:.1%} of all digits; the first client alone: {alone:.1%}")
