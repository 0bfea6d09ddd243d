"""``onnxgrad …``, of which rank 1 is killed in the middle of its eighth step; not when it is started anew.

Several commands, with ``--then`` between them, are done in the same processes, which saves starting others; those that
are started anew, and the kill, are for the last one.
"""

import os
import signal
import sys

from onnxgrad.cli import main
from onnxgrad.training.parallel.machine import DataParallel

gradients, steps, left = DataParallel.gradients, 0, 0
is_first_try = os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0"


def dying(machine, batch):
    global steps
    steps += 1
    if steps == 8 and not left and os.environ.get("RANK") == "1" and is_first_try:
        os.kill(os.getpid(), signal.SIGKILL)
    return gradients(machine, batch)


DataParallel.gradients = dying
commands = [[]]
for word in sys.argv[1:]:
    if word == "--then":
        commands.append([])
    else:
        commands[-1].append(word)
if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
    del commands[:-1]
while commands:
    sys.argv, steps, left = ["onnxgrad", *commands.pop(0)], 0, len(commands)
    try:
        main()
    except SystemExit as ended:
        if ended.code:
            raise
