"""fit: the one loop. Data, progress bar, callbacks, checkpoints, interrupts, failures."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import monotonic
from typing import Any

import torch
import torch.distributed as dist

from bisls._check import require_argument, whole
from bisls.callbacks import FitState, check_callbacks
from bisls.checkpoint import Checkpoint, Run, rank, world
from bisls.feed import Exhausted, check_two, feed, random_state, set_random_state
from bisls.record import History, Record, Status

logger = logging.getLogger(__name__)


class FitError(RuntimeError):
    """An iteration failed and ``on_failure="raise"`` was asked for.

    Attributes:
        record: The record of that iteration.
        level: What failed: "upper level", "lower level", "linear solve", or several of them.
        advice: What would help.
        history: All records up to it.
    """

    def __init__(self, record: Record, history: History):
        self.record = record
        self.history = history
        self.level = ", ".join(level for level, _ in failures(record))
        self.advice = record.advice or record.status.advice
        super().__init__(f"iteration {record.k} failed ({self.level}): {self.advice}")


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, or SIGTERM, during `fit`. The running iteration was finished; ``history`` has all records up to it."""

    def __init__(self, text: str, history: History):
        super().__init__(text)
        self.history = history


def fit(
    solver: Any,
    upper_data: Any = None,
    lower_data: Any = None,
    steps: int = 500,
    progress: bool = True,
    callbacks: Sequence[Any] = (),
    checkpoint: str | os.PathLike[str] | Checkpoint | None = None,
    resume: bool = False,
    on_failure: str = "warn",
) -> History:
    """Run a solver: one outer iteration after another, on batches drawn from the data.

    An iteration takes one upper batch and, where the lower data are batches, ``solver.lower_iters`` lower ones, whether the
    lower loop uses all of them or not: the place in the data depends on the iteration alone.

    *Interrupts.* Ctrl-C, or SIGTERM, lets the running iteration finish, writes the checkpoint and raises `Interrupted`, a
    `KeyboardInterrupt` that carries the history. A second Ctrl-C stops at once: the parameters go back to the last iteration
    that was finished, and the checkpoint is the one written last.

    *Exact resume.* A run that was killed and is started again with ``resume=True`` gives bit for bit what it would have given:
    parameters, records, order of the data, random numbers.

    Args:
        solver: `BiSLS`, `BiSPS`, `Alternating` or another composition.
        upper_data: Batches of the upper loss: a tensor, a tuple or dict of tensors or None (the same batch for every step); a
            DataLoader (its epochs one after another); an iterator (a run ends where it does); a callable that returns a batch.
            `bisls.feed.feed` says more.
        lower_data: The same for the lower loss.
        steps: Iterations of the run, at least 0. A resumed run goes on to the same total.
        progress: Show a progress bar on a terminal (with rich, from ``bisls[cli]``); elsewhere log a line now and then.
        callbacks: Objects with any of the hooks of `Callback`, or functions of (record, state).
        checkpoint: A path, or a `Checkpoint`, to save the run to.
        resume: Go on from the checkpoint; without a file yet, start from the beginning. Without it an existing file is an error,
            so that no run is lost.
        on_failure: What to do about records whose status is a failure: "warn" logs each kind with its advice once, and counts;
            "raise" writes the checkpoint and raises `FitError`; "ignore" leaves it to the reader of the history.

    Returns:
        The records of all iterations, those before a resume among them.

    Raises:
        ValueError: An argument cannot be used.
        CheckpointError: The checkpoint is damaged, or of another problem or method.
        FitError: An iteration failed, with ``on_failure="raise"``.
        Interrupted: Ctrl-C or SIGTERM.

    Examples:
        >>> import torch
        >>> from bisls.methods import BiSLS
        >>> from bisls.problem import Bilevel
        >>> x = torch.tensor([0.5], requires_grad=True)
        >>> y = torch.tensor([2.0, -1.0], requires_grad=True)
        >>> problem = Bilevel(
        ...     upper_loss=lambda batch: ((y - 3.0) ** 2).sum(),
        ...     lower_loss=lambda batch: ((y - x) ** 2).sum(),
        ...     upper_params=[x],
        ...     lower_params=[y],
        ... )
        >>> history = fit(BiSLS(problem), steps=20, progress=False)
        >>> len(history), round(x.item(), 2)
        (20, 3.0)
    """
    _check_solver(solver)
    require_argument("fit", "steps", steps, whole(steps, 0), "must be a whole number, at least 0")
    kinds = ("warn", "raise", "ignore")
    require_argument("fit", "on_failure", on_failure, on_failure in kinds, 'must be "warn", "raise" or "ignore"')
    require_argument(
        "fit", "resume", resume, isinstance(resume, bool), "must be True or False; the path is checkpoint=..."
    )
    if isinstance(checkpoint, str | os.PathLike):
        checkpoint = Checkpoint(checkpoint)
    fits = checkpoint is None or isinstance(checkpoint, Checkpoint)
    require_argument("fit", "checkpoint", checkpoint, fits, "must be a path or a Checkpoint(path, ...)")
    rule = "needs to know what to resume from: pass checkpoint=path as well"
    require_argument("fit", "resume", resume, checkpoint is not None or not resume, rule)
    watchers = check_callbacks(callbacks)
    check_two(upper_data, lower_data)
    feeds = {"upper": feed(upper_data, "upper_data"), "lower": feed(lower_data, "lower_data")}
    run = Run(solver, feeds, History(), watchers, solver.k)
    resumed = checkpoint.begin(run, resume) if checkpoint else False
    if resumed:
        logger.info("resumed at k = %d", solver.k)
    return _Fit(run, run.start + steps, progress, checkpoint, resume, on_failure).go()


class _Fit:
    """A run under way."""

    def __init__(
        self, run: Run, end: int, progress: bool, checkpoint: Checkpoint | None, resume: bool, on_failure: str
    ):
        self.run = run
        self.checkpoint = checkpoint
        self.on_failure = on_failure
        self.state = FitState(run.solver, run.history, end, resume)
        self.progress = progress
        self.counts: Counter[tuple[str, Status]] = Counter()
        self.saved_k = run.solver.k if len(run.history) else -1
        self.saved_at = monotonic()

    def go(self) -> History:
        """All iterations, and what comes at the end whatever happens."""
        solver, state, started = self.run.solver, self.state, []
        try:
            for callback in self.run.callbacks:
                _hook(callback, "start", state)
                started.append(callback)
            with _signals() as caught, Progress(self.progress, state.steps, solver.k) as bar:
                while solver.k < state.steps and not state.reason:
                    if not self._iteration(bar, caught):
                        break
                self._save(only_new=True)
                if caught:
                    raise self._interrupted(caught)
        except BaseException:
            self._end(started)
            raise
        error = self._end(started)
        if error is not None:
            raise error
        if state.reason:
            logger.info("stopped at k = %d: %s", solver.k, state.reason)
        return self.run.history

    def _iteration(self, bar: Progress, caught: list[str]) -> bool:
        """One iteration and all that follows it; False where the data have ended."""
        solver, history = self.run.solver, self.run.history
        batches = self._draw()
        if batches is None:
            return False
        try:
            # with one batch for every step there is no other that could judge it
            record = solver.step(*batches, batches[0] if self.run.feeds["upper"].whole else None)
        except Exception as raised:
            kept = (
                f", the checkpoint {str(self.checkpoint.path)!r} is of k = {self.saved_k}"
                if self.checkpoint and self.saved_k >= 0
                else ""
            )
            raised.add_note(f"in iteration {len(history) + self.run.start} of fit{kept}")
            raise
        history.append(record)
        for own in self.run.feeds.values():
            own.commit()
        failure = self._judge(record)
        error: BaseException | None = None
        for callback in self.run.callbacks:
            try:
                _hook(callback, "step", record, self.state)
            except BaseException as raised:
                error = raised
                break
        bar.show(record, self.state)
        stop = _any([bool(caught), error is not None or failure is not None, bool(self.state.reason), self._late()])
        interrupted, broken, ended, late = stop
        if interrupted or broken or ended or late or self._due():
            try:
                self._save()
            except OSError as unsaved:  # a full disk does not end the run, nor hide what did
                logger.error("k = %d: %s", solver.k, unsaved)
        if error is not None:
            raise error
        if failure is not None:
            raise failure
        if broken:
            raise RuntimeError(f"the run ended at k = {solver.k}: a callback raised on another rank")
        if interrupted:
            raise self._interrupted(caught)
        if ended and not self.state.reason:
            self.state.stop("another rank stopped")
        return True

    def _draw(self) -> tuple[Any, Any] | None:
        """One upper batch and T lower ones; None, with the random state as before, where there are not so many."""
        upper, lower = self.run.feeds["upper"], self.run.feeds["lower"]
        endless = upper.endless and lower.endless
        before = None if endless else random_state()
        batches, end = None, None
        try:
            first = upper.take()
            rest = lower.take() if lower.whole else [lower.take() for _ in range(self.run.solver.lower_iters)]
            batches = (first, rest)
        except Exhausted as ended:
            end = ended
        if before is None or not _any([end is not None])[0]:
            return batches
        set_random_state(before)
        logger.info("the run ends at k = %d: %s", self.run.solver.k, end or "the data of another rank have ended")
        return None

    def _judge(self, record: Record) -> FitError | None:
        if not record.status.failed or self.on_failure == "ignore":
            return None
        if self.on_failure == "raise":
            return FitError(record, self.run.history)
        for level, status in failures(record):
            self.counts[level, status] += 1
            if self.counts[level, status] == 1:
                logger.warning("k = %d: %s: %s: %s", record.k, level, status.name, status.advice)
        return None

    def _due(self) -> bool:
        return self.checkpoint is not None and self.run.solver.k % self.checkpoint.every == 0

    def _late(self) -> bool:
        """Whether the last checkpoint is too old; a matter of clocks, so the ranks must agree on it."""
        seconds = self.checkpoint.seconds if self.checkpoint else None
        return seconds is not None and monotonic() - self.saved_at >= seconds

    def _save(self, only_new: bool = False) -> None:
        if self.checkpoint is None or (only_new and self.saved_k == self.run.solver.k):
            return
        self.checkpoint.save(self.run)
        self.saved_k, self.saved_at = self.run.solver.k, monotonic()

    def _interrupted(self, caught: list[str]) -> Interrupted:
        what = caught[0] if caught else "an interrupt on another rank"
        text = f"{what} at k = {self.run.solver.k} of {self.state.steps}"
        if self.checkpoint is not None:
            text += f"; go on with fit(..., checkpoint={str(self.checkpoint.path)!r}, resume=True)"
        logger.warning(text)
        return Interrupted(text, self.run.history)

    def _end(self, started: list[Any]) -> Exception | None:
        """The last hooks and the count of failures; returns what a hook raised, once all were called."""
        error: Exception | None = None
        for callback in started:
            try:
                _hook(callback, "end", self.run.history)
            except Exception as raised:
                logger.exception("callback %r failed at the end of the run", callback)
                error = error or raised
        if self.counts.total() > len(self.counts):  # some came more than once
            kinds = "; ".join(f"{n} times {level} {status.name}" for (level, status), n in self.counts.items())
            logger.warning("in %d iterations: %s", len(self.run.history), kinds)
        return error


def failures(record: Record) -> list[tuple[str, Status]]:
    """What failed in an iteration: pairs of the level and its status."""
    levels = (
        ("upper level", record.upper_status),
        ("lower level", record.lower_status),
        ("linear solve", record.linear_status),
    )
    found = [(level, status) for level, status in levels if status.failed]
    return found or ([("iteration", record.status)] if record.status.failed else [])


class Progress:
    """A progress bar on a terminal or in a notebook; anywhere else a line in the log now and then.

    Args:
        enabled: Whether to show anything.
        total: Where it ends.
        done: Where it begins.
        what: What is counted.
        every: Seconds between two lines of the log.
    """

    def __init__(self, enabled: bool, total: int, done: int = 0, what: str = "iterations", every: float = 30.0):
        self.total = total
        self.done = self.first = done
        self.what = what
        self.every = every
        self.checks = 0
        self.begun = self.logged = monotonic()
        self._bar: Any = None
        self._logs = enabled and rank() == 0
        if self._logs:
            self._bar = _rich_bar()
        if self._bar is not None:
            self._logs = False
            self._task = self._bar.add_task("", total=total, completed=done)

    def __enter__(self) -> Progress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, record: Record, state: FitState) -> None:
        """An iteration is done."""
        self.checks += record.upper_checks + record.lower_checks
        mean = self.checks / (self.done + 1 - self.first)
        text = (
            f"f {record.upper_value:.4g}  g {record.lower_value:.4g}  alpha {record.alpha:.2g}  beta {record.beta:.2g}  "
            f"checks {mean:.1f}"
        )
        self.advance("  ".join([text, *(f"{name} {value:.4g}" for name, value in state.shown.items())]))

    def advance(self, text: str) -> None:
        """One more is done."""
        self.done += 1
        if self._bar is not None:
            self._bar.update(self._task, completed=self.done, description=text)
        elif self._logs and monotonic() - self.logged >= self.every:
            self.logged = monotonic()
            left = (self.logged - self.begun) / (self.done - self.first) * (self.total - self.done)
            logger.info("%d/%d %s  %s  %.0f s left", self.done, self.total, self.what, text, left)


def _rich_bar() -> Any:
    """A bar of rich, or None where rich is missing or nobody would see it move."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as RichProgress
    except ImportError:
        return None
    console = Console(stderr=True)
    if not (console.is_terminal or console.is_jupyter):
        return None
    columns = (
        MofNCompleteColumn(),
        BarColumn(20),
        TimeRemainingColumn(),
        TextColumn("{task.description}", markup=False),
    )
    return RichProgress(*columns, console=console, refresh_per_second=4)


@contextmanager
def _signals() -> Iterator[list[str]]:
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


def _hook(callback: Any, name: str, *arguments: Any) -> None:
    hook: Callable[..., Any] | None = getattr(callback, name, None)
    if hook is not None:
        hook(*arguments)


def _any(flags: list[bool]) -> list[bool]:
    """Which flags are up on any rank, so that all ranks do the same."""
    if world() == 1:
        return flags
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
    up = torch.tensor(flags, dtype=torch.int32, device=device)
    dist.all_reduce(up, op=dist.ReduceOp.MAX)
    return [bool(flag) for flag in up.tolist()]


def _check_solver(solver: Any) -> None:
    if isinstance(solver, type):
        raise ValueError(
            f"`fit(solver={solver.__name__})`: this is a class; pass an instance: {solver.__name__}(problem)"
        )
    needed = ("problem", "lower_iters", "k", "step", "state_dict", "load_state_dict")
    missing = [name for name in needed if not hasattr(solver, name)]
    if missing:
        raise ValueError(
            f"`fit(solver={solver!r})`: solver must be a solver, such as BiSLS(problem); a {type(solver).__name__} has no "
            f"{', '.join(missing)}"
        )
