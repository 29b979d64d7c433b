"""The template of workers that serve nothing: python -m tests.service.workers.puppet HOW FD DEVICE. A worker says that
it is ready, then does as HOW says once there is a file ``go`` in PUPPET_FOLDER, where each start is a line too."""

import os
import signal
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from kestrel_grpc.workers import template
from kestrel_grpc.workers.line import Alive, Failed, Ready, WorkerEnd

FOLDER = "PUPPET_FOLDER"


def main(how: str, arguments: Sequence[str]) -> int:
    line = WorkerEnd(int(arguments[0]))
    try:
        task = line.task()
    except EOFError:
        return 1
    index = str(task.index)
    done = Path(os.environ[FOLDER], f"done-{index}")
    first = not done.exists()
    with done.open("a") as file:
        file.write(f"{os.getpid()} {task.device} {os.environ.get('CUDA_VISIBLE_DEVICES', '-')}\n")
    if how == "fails" and index == "1":
        line.send(Failed("must be smaller", "max_batch_size", "9"))
        return 1
    if how == "misnames" and index == "1":
        line.send(Failed("--skill=a:B: none", setting=True))
        return 1
    stopped = False

    def stop(*_: object) -> None:
        nonlocal stopped
        stopped = True

    signal.signal(signal.SIGTERM, signal.SIG_IGN if how == "stays" else stop)
    line.send(Ready("puppet", "", "none", 0.5, ()))
    go = Path(os.environ[FOLDER], "go")
    while not stopped:
        if not go.exists():
            line.send(Alive())
            time.sleep(0.02)
            continue
        if index == "0" and (how == "dies" or (how == "dies_once" and first)):
            os.kill(os.getpid(), signal.SIGKILL)
        if index == "0" and how == "ends_once" and first:
            return 0
        if not (index == "0" and how == "silent_once" and first):
            line.send(Alive())
        time.sleep(0.02)
    return 3 if how == "ends_badly" else 0


if __name__ == "__main__":
    how, *arguments = sys.argv[1:]
    sys.exit(template.main(arguments, modules=(), worker=partial(main, how)))
