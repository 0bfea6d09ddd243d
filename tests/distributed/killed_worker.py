"""``onnxgrad …``, of which rank 1 is killed in the middle of its eighth step; not when it is started anew."""

import os
import signal

from onnxgrad.cli import main
from onnxgrad.training.parallel.machine import DataParallel

gradients, steps = DataParallel.gradients, 0


def dying(machine, batch):
    global steps
    steps += 1
    if steps == 8 and os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    return gradients(machine, batch)


DataParallel.gradients = dying
main()
