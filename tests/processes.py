"""Two processes side by side, for tests of what they agree on."""

from __future__ import annotations

import queue as queues
import socket
from time import monotonic

import torch.multiprocessing as mp


def spawned(target, *arguments, within: float = 120.0) -> list:
    """What two processes put into their queue; each is called with its rank, a port that is free, the queue, and the arguments.

    A process that ends without an answer is an error at once, and so is one that has none in so many seconds.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = mp.get_context("spawn")
    queue = context.Queue()
    workers = [context.Process(target=target, args=(rank, port, queue, *arguments)) for rank in range(2)]
    for worker in workers:
        worker.start()
    answers: list = []
    end = monotonic() + within
    try:
        while len(answers) < len(workers):
            ended = [worker.exitcode for worker in workers if worker.exitcode is not None]
            try:
                answers.append(queue.get(timeout=0.2))
            except queues.Empty:
                # an answer may still be on its way when its process has ended, so the count is of the look before
                assert len(ended) <= len(answers), f"{ended} are the exit codes, {answers} the answers"
                assert monotonic() < end, f"no answer in {within:g} s; {answers} came"
        for worker in workers:
            worker.join(max(end - monotonic(), 5.0))
            assert worker.exitcode == 0
    finally:
        for worker in workers:
            if worker.is_alive():
                worker.kill()
                worker.join()
    return answers
