"""Progress: one bar for all that takes long, and lines in the log where nobody would see it move."""

from __future__ import annotations

import logging
from time import monotonic
from typing import Any

from bisls.ranks import rank

logger = logging.getLogger(__name__)


class Progress:
    """A progress bar on a terminal or in a notebook; anywhere else a line in the log now and then.

    Args:
        enabled: Whether to show anything.
        total: Where it ends; None where that is not known.
        done: Where it begins.
        what: What is counted.
        every: Seconds between two lines of the log.
        console: A console of rich to draw on; by default one on standard error.

    Examples:
        >>> with Progress(False, 3, what="runs") as bar:
        ...     bar.advance("the first")
        ...     bar.reach(3)
        >>> bar.done
        3
    """

    transient = False  # whether the bar goes away at the end

    def __init__(
        self,
        enabled: bool,
        total: int | None,
        done: int = 0,
        what: str = "iterations",
        every: float = 30.0,
        console: Any = None,
    ):
        self.total = total
        self.done = self.first = done
        self.what = what
        self.every = every
        self.begun = self.logged = monotonic()
        self._text = ""
        self._bar: Any = None
        self._logs = enabled and rank() == 0
        if self._logs:
            self._bar = self._rich_bar(console)
        self._task: Any = None
        if self._bar is not None:
            self._logs = False
            self._task = self._bar.add_task("", total=total, completed=done)

    def __enter__(self) -> Progress:
        self._draw("start")
        return self

    def __exit__(self, *_: object) -> None:
        self._draw("stop")

    def begin(self, text: str, total: int | None) -> None:
        """Count anew, for the next of several things."""
        self.total, self._text = total, text
        self.done = self.first = 0
        self.begun = monotonic()
        if self._bar is not None:
            self._draw("reset", self._task, total=total, description=text)

    def expect(self, total: int) -> None:
        """There are so many in all, as it turns out."""
        self.total = total
        self._draw("update", self._task, total=total)

    def advance(self, text: str | None = None, by: int = 1) -> None:
        """So many more are done; without a text the last one stays."""
        self.reach(self.done + by, text)

    def reach(self, done: int, text: str | None = None) -> None:
        """So many are done by now."""
        self.done = done
        self._text = self._text if text is None else text
        if self._bar is not None:
            self._draw("update", self._task, completed=done, description=self._text)
        elif self._logs and monotonic() - self.logged >= self.every:
            self.logged = monotonic()
            self._say(f"{self._counted()}  {self._text}{self._left()}")

    def _say(self, line: str) -> None:
        """A line where there is no bar."""
        logger.info("%s", line)

    def _draw(self, what: str, *arguments: Any, **options: Any) -> None:
        """Ask the bar for something. A terminal that has gone away takes the bar with it, not the run."""
        if self._bar is None:
            return
        try:
            getattr(self._bar, what)(*arguments, **options)
        except (OSError, ValueError) as error:  # ValueError: a stream that is closed
            self._bar, self._logs = None, True
            logger.warning("the progress bar could not be drawn (%s: %s); it ends here", type(error).__name__, error)

    def _counted(self) -> str:
        return f"{self.done}{'' if self.total is None else f'/{self.total}'} {self.what}"

    def _left(self) -> str:
        if self.total is None or self.done <= self.first:
            return ""
        return f"  {(self.logged - self.begun) / (self.done - self.first) * (self.total - self.done):.0f} s left"

    def _rich_bar(self, console: Any) -> Any:
        """A bar of rich, or None where rich is missing or nobody would see it move."""
        try:
            from rich import progress
            from rich.console import Console
        except ImportError:
            return None
        console = console or Console(stderr=True)
        if not (console.is_terminal or console.is_jupyter):
            return None
        columns = self._columns(progress)
        return progress.Progress(*columns, console=console, refresh_per_second=4, transient=self.transient)

    def _columns(self, columns: Any) -> tuple[Any, ...]:
        """What a line of the bar is made of, from the module `rich.progress`."""
        return (
            columns.MofNCompleteColumn(),
            columns.BarColumn(20),
            columns.TimeRemainingColumn(),
            columns.TextColumn("{task.description}", markup=False),
        )


class Transfer(Progress):
    """The bar of a download: bytes, and how fast they come. It goes away at the end.

    Args:
        console: A console of rich to draw on; by default one on standard error.
    """

    transient = True

    def __init__(self, console: Any = None):
        super().__init__(True, None, what="bytes", console=console)

    def _columns(self, columns: Any) -> tuple[Any, ...]:
        return (
            columns.TextColumn("{task.description}", markup=False),
            columns.BarColumn(20),
            columns.DownloadColumn(),
            columns.TransferSpeedColumn(),
        )


class Sweep(Progress):
    """The bar of many runs for several figures. The time left goes by the work that is done: runs differ a hundredfold in length.

    Args:
        console: The console of rich to draw on. Where nobody would see a bar move, it has a line a minute.
        figures: How many figures.
    """

    def __init__(self, console: Any, figures: int):
        super().__init__(True, 0, what="runs", every=60.0, console=console)
        self.console, self.figures, self.finished = console, figures, 0
        self.work = self.work_done = 0.0

    def wanted(self, runs: int, work: float) -> None:
        """So many runs more, and how much work they are."""
        self.work += work
        self.expect((self.total or 0) + runs)

    def ran(self, work: float) -> None:
        """A run is finished."""
        self.work_done += work
        self.advance(self._so_far())

    def drew(self) -> None:
        """A figure is finished."""
        self.finished += 1
        self.reach(self.done, self._so_far())

    def _so_far(self) -> str:
        share = self.work_done / self.work if self.work > 0 else 0.0
        left = (monotonic() - self.begun) * (1.0 / share - 1.0) if share > 0 else None
        return f"{self.finished}/{self.figures} figures{'' if left is None else f', about {duration(left)} left'}"

    def _left(self) -> str:
        return ""  # the text says it

    def _say(self, line: str) -> None:
        self.console.print(line)

    def _columns(self, columns: Any) -> tuple[Any, ...]:
        return (
            columns.MofNCompleteColumn(),
            columns.TextColumn("runs"),
            columns.BarColumn(20),
            columns.TimeElapsedColumn(),
            columns.TextColumn("{task.description}", markup=False),
        )


def duration(seconds: float) -> str:
    """A time in words: "1 h 5 min", "3 min", "12 s"."""
    minutes = int(seconds // 60)
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{minutes} min" if minutes else f"{int(seconds)} s"
