"""What `bisls fit` and `bisls predict` print, and the codes they end with."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from bisls.interrupts import stopped_alike
from bisls.tables.fitting import Asked, run_fit
from bisls.tables.predicting import run_predict
from bisls.tables.reading import TableError

SELDOM = 10.0  # seconds between lines about a fit that takes long, where there is no terminal


def fit_command(asked: Asked, out: Path) -> int:
    """Fit a table; the code to end with."""
    console = Console(emoji=False, stderr=True)

    def work() -> list[str]:
        with stopped_alike(), console.status("reading") as status:

            def say(line: str) -> None:
                status.update(escape(line))
                console.print(line, markup=False, highlight=False, soft_wrap=True)

            # before the work, so that a folder that can't be written is said at once
            out.mkdir(parents=True, exist_ok=True)
            shown = [time.monotonic()]

            def progress(line: str) -> None:
                """In a terminal at once; in a file now and then, so that it is seen to go on."""
                if console.is_terminal:
                    status.update(escape(f"penalties by group: {line}"))
                elif time.monotonic() - shown[0] >= SELDOM:
                    shown[0] = time.monotonic()
                    console.print(f"penalties by group: {line}", markup=False, highlight=False, soft_wrap=True)

            with _told(progress):
                page, verdict = run_fit(asked, out, say)
        return [verdict, f"page: {page}", f"model: {out / 'model.json'}"]

    stopped = f"\nstopped; what is finished is kept in {out / 'stages'}: the same command goes on from there"
    return _ended(work, out, stopped, "; what is finished is kept")


def predict_command(model: Path, table: Path, out: Path) -> int:
    """Predict the rows of a table; the code to end with."""

    def work() -> list[str]:
        run_predict(model, table, out, lambda line: print(line, file=sys.stderr))
        return [f"predictions: {out}"]

    return _ended(work, out, "stopped", "")


@contextmanager
def _told(show: Callable[[str], None]) -> Iterator[None]:
    """Show what the estimators log on their way."""

    class Shown(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            show(record.getMessage())

    logger, handler = logging.getLogger("bisls.sklearn"), Shown()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)


def _ended(work: Callable[[], list[str]], out: Path, stopped: str, kept: str) -> int:
    try:
        lines = work()
    except TableError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(stopped, file=sys.stderr)
        return 130
    except OSError as error:
        print(f"cannot write to --out {out}: {error.strerror or error}{kept}", file=sys.stderr)
        return 1
    print("\n".join(lines))
    return 0
