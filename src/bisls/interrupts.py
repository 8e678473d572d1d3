"""Ctrl-C and SIGTERM: the first is noted, so that what is under way can be finished, the second acts."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

logger = logging.getLogger(__name__)


@contextmanager
def noted_signals() -> Iterator[list[str]]:
    """Within this context a first SIGINT or SIGTERM is only noted; a second one acts as before."""
    caught: list[str] = []
    before: dict[int, Any] = {}
    owner = os.getpid()

    def note(number: int, frame: Any) -> None:
        if os.getpid() != owner:  # a worker of a DataLoader: it lives on, so that the iteration can be finished
            if number != signal.SIGINT:
                signal.signal(number, signal.SIG_DFL)
                signal.raise_signal(number)
            return
        caught.append(signal.Signals(number).name)
        if number == signal.SIGINT:
            logger.warning("finishing the iteration; press Ctrl-C again to stop at once")
        for own, handler in before.items():
            signal.signal(own, handler)
        before.clear()

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            handler = signal.getsignal(number)
            if handler not in (signal.SIG_IGN, None):  # a job in the background ignores Ctrl-C, and goes on to
                before[number] = handler
                signal.signal(number, note)
    try:
        yield caught
    finally:
        for own, handler in list(before.items()):
            signal.signal(own, handler)


@contextmanager
def stopped_alike() -> Iterator[None]:
    """SIGTERM stops as Ctrl-C does: workers are ended, what is finished is kept, and the message says how to go on."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    try:
        before = signal.signal(signal.SIGTERM, stop)
    except ValueError:  # not in the main thread: nothing to arrange
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
