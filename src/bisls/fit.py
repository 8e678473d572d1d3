"""fit: the one loop. Data, progress bar, callbacks, checkpoints, interrupts, failures."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from bisls._check import FLAG, PATH, choice, number, optional, require_argument, settled, whole_number
from bisls.agreement import agree, agree_on_parameters
from bisls.checkpoint import Checkpoint, Run
from bisls.draws import Draws, check_two, number_type, takes_judge
from bisls.feed import feed
from bisls.hooks import FitState, check_callbacks, in_order, is_late
from bisls.interrupts import noted_signals
from bisls.logs import check_apart
from bisls.progress import Progress
from bisls.ranks import hear, on_any_rank, together
from bisls.record import History, Record
from bisls.saving import Saving
from bisls.standstill import Standstill
from bisls.status import Status

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


@together
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
    *,
    step_data: Any = None,
    tol: float | None = 0.0,
    broadcast: bool = False,
) -> History:
    """Run a solver: one outer iteration after another, on batches drawn from the data.

    An iteration takes one upper batch and, where the lower data are batches, ``solver.lower_iters`` lower ones, and as many more
    as the hypergradient declares (`StochasticNeumann`: a fresh one for each factor), whether all of them are used or not: the
    place in the data depends on the iteration alone.

    *Where nothing can be gained any more.* With one batch for every step at both levels the run stops where f, x and y have stood
    still for ten iterations in a row, up to rounding, or where f has not fallen in thirty iterations whose search could not see
    beyond the rounding of f, while x only goes to and fro; ``history.stopped`` and the log say so. Slow progress is progress, and
    so is a step that still grows. With several batches, or random losses, a run never stops by itself. A loader whose epoch is
    one batch counts as one batch, as long as that holds the same numbers every time.

    *Interrupts.* Ctrl-C, or SIGTERM, lets the running iteration finish, writes the checkpoint and raises `Interrupted`, a
    `KeyboardInterrupt` that carries the history. A second Ctrl-C stops at once: the parameters go back to the last iteration
    that was finished, and the checkpoint is the one written last.

    *Exact resume.* A run that was killed and is started again with ``resume=True`` gives bit for bit what it would have given:
    parameters, records, order of the data, random numbers.

    *Where the disk refuses.* A checkpoint is tried before the first iteration: a path that cannot be written is a ValueError
    then. Later it ends no run: a checkpoint that could not be written is a warning, the file that was there before stays, the
    run goes on, and the next one is tried when it is due. Where also the last one fails, ``history.unsaved`` and the log say why,
    and the run ends as any other: the parameters are in memory, to be saved elsewhere. Logs that fail are warned about once.

    Args:
        solver: `BiSLS`, `BiSPS`, `Alternating` or another composition.
        upper_data: Batches of the upper loss: a tensor, a tuple or dict of tensors or None (the same batch for every step); a
            DataLoader (its epochs one after another); an iterator (a run ends where it does); a callable that returns a batch.
            NumPy arrays and data frames become tensors, their floating-point numbers of the type of the lower parameters.
            `bisls.feed.feed` says more.
        lower_data: The same for the lower loss. Where the problem has a ``lower_start``, an iteration takes one batch, for all
            lower steps, and None stands for the upper batch: the two belong together.
        steps: Iterations of the run, at least 0. A resumed run goes on to the same total.
        progress: Show a progress bar on a terminal (with rich, from ``bisls[cli]``); elsewhere log a line now and then.
        callbacks: Objects with any of the hooks of `Callback`, or functions of (record, state); called in this order, logs last.
        checkpoint: A path, or a `Checkpoint`, to save the run to.
        resume: Go on from the checkpoint; without a file yet, start from the beginning. Without it an existing file is an error,
            so that no run is lost.
        on_failure: What to do about records whose status is a failure: "warn" logs each kind with its advice once, and counts;
            "raise" writes the checkpoint and raises `FitError`; "ignore" leaves it to the reader of the history.
        step_data: Upper batches that judge the steps, independent of ``upper_data`` (two samples); given as those are. None: the
            previous upper batch judges. Refused where the solver looks at one sample alone.
        tol: The relative change of f, x and y that counts as standing still, at least 0; 0 is rounding alone. None: the run never
            stops by itself, for losses that change from outside (a callback that turns a penalty up) or that hide all progress
            under a large constant.
        broadcast: With several processes: write rank 0's parameters into those of the others first. Otherwise parameters that
            differ are an error.

    Returns:
        The records of all iterations, those before a resume among them; ``stopped`` says why there are fewer than asked for.

    Raises:
        ValueError: An argument cannot be used, a path that cannot be written among them; or the processes of a run do not begin
            with the same parameters and settings.
        RankError: Another process has failed; the message says which, and what it raised.
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
        >>> history = fit(BiSLS(problem), steps=500, progress=False)
        >>> len(history) < 50, round(x.item(), 2)
        (True, 3.0)
        >>> history.stopped
        'no change of f, x and y beyond rounding in 10 iterations (tol=0)'
    """
    _check_solver(solver)
    steps = settled("fit", "steps", steps, whole_number(0))
    progress = settled("fit", "progress", progress, FLAG)
    on_failure = settled("fit", "on_failure", on_failure, choice("warn", "raise", "ignore"))
    resume = settled("fit", "resume", resume, replace(FLAG, rule="must be True or False; the path is checkpoint=..."))
    tol = settled("fit", "tol", tol, optional(number("[0, inf)", "must be at least 0, or None")))
    broadcast = settled("fit", "broadcast", broadcast, FLAG)
    if isinstance(checkpoint, str | os.PathLike):
        checkpoint = Checkpoint(settled("fit", "checkpoint", checkpoint, PATH))
    fits = checkpoint is None or isinstance(checkpoint, Checkpoint)
    require_argument("fit", "checkpoint", checkpoint, fits, "must be a path or a Checkpoint(path, ...)")
    rule = "needs to know what to resume from: pass checkpoint=path as well"
    require_argument("fit", "resume", resume, checkpoint is not None or not resume, rule)
    watchers = check_callbacks(callbacks)
    if checkpoint is not None:
        check_apart(watchers, checkpoint.path)
    check_two(upper_data, lower_data)
    dtype = number_type(solver.problem)
    feeds = {
        "upper": feed(upper_data, "upper_data", dtype=dtype),
        "lower": feed(lower_data, "lower_data", dtype=dtype),
    }
    if step_data is not None:
        rule = (
            f"must be None here: {type(solver).__name__} has no use for a batch that judges, its response looks at one sample; "
            "Tangent() and BiSPS(samples=2) look at two"
        )
        require_argument("fit", "step_data", step_data, takes_judge(solver), rule)
        check_two(step_data, upper_data, names=("step_data", "upper_data"))
        check_two(step_data, lower_data, names=("step_data", "lower_data"))
        feeds["step"] = feed(step_data, "step_data", dtype=dtype)
    every = None if checkpoint is None else (checkpoint.every, checkpoint.seconds is not None)
    agree(
        "fit",
        steps=steps,
        resume=resume,
        on_failure=on_failure,
        tol=tol,
        step_data=step_data is not None,
        checkpoint=every,
    )
    cure = "; `fit(..., broadcast=True)` does so"
    agree_on_parameters("fit(...)", solver.problem.levels, equal=broadcast, cure=cure)
    draws = Draws(solver, feeds)
    still = None if tol is None or draws.noisy else Standstill(solver.problem, tol)
    run = Run(solver, feeds, History(), watchers, solver.k, still)
    resumed = checkpoint.begin(run, resume) if checkpoint else False
    if resumed:
        logger.info("resumed at k = %d", solver.k)
    return _Fit(run, draws, run.start + steps, progress, checkpoint, resume, on_failure).go()


class _Fit:
    """A run under way."""

    def __init__(
        self,
        run: Run,
        draws: Draws,
        end: int,
        progress: bool,
        checkpoint: Checkpoint | None,
        resume: bool,
        on_failure: str,
    ):
        self.run, self.draws = run, draws
        self.on_failure = on_failure
        self.state = FitState(run.solver, run.history, end, resume)
        self.progress = progress
        self.checks = self.done = 0  # of this process, for the progress bar
        self.counts: Counter[tuple[str, Status]] = Counter()
        self.callbacks = in_order(run.callbacks)
        self.saving = Saving(checkpoint, run)

    def go(self) -> History:
        """All iterations, and what comes at the end whatever happens."""
        solver, state, history = self.run.solver, self.state, self.run.history
        started: list[Any] = []
        try:
            self._look(None)  # a run that had stopped stays so when it is resumed
            self._begin(started)
            with noted_signals() as caught, Progress(self.progress, state.steps, solver.k) as bar:
                while solver.k < state.steps and not state.reason:
                    if not self._iteration(bar, caught):
                        break
                self.saving.save(only_new=True)
                if caught:
                    raise self._interrupted(caught)
        except BaseException as raised:
            history.stopped = f"{type(raised).__name__}: {raised}".partition("\n")[0]
            self._end(started)
            raise
        if state.reason and solver.k < state.steps:
            history.stopped = state.reason
        state.finished = True
        error = self._end(started)
        if error is not None:
            raise error
        if state.reason:
            logger.info("stopped at k = %d: %s", solver.k, state.reason)
        return history

    def _begin(self, started: list[Any]) -> None:
        """The first hooks, and a look at what would be saved."""
        for callback in self.callbacks:
            _hook(callback, "start", self.state)
            started.append(callback)
        if self.saving.checkpoint is not None:
            self.saving.checkpoint.rehearse(self.run)
        hear()  # all ranks begin, or none

    def _look(self, record: Record | None) -> None:
        """Stop where nothing changes any more."""
        still = self.run.still
        if still is None:
            return
        if record is not None:
            still.look(record)
        if still.reason:
            self.state.stop(still.reason)

    def _iteration(self, bar: Progress, caught: list[str]) -> bool:
        """One iteration and all that follows it; False where the data have ended."""
        solver, history = self.run.solver, self.run.history
        drawn = self.draws.take()
        if isinstance(drawn, str):
            history.stopped = drawn
            logger.info("the run ends at k = %d: %s", solver.k, drawn)
            return False
        if self.draws.noisy:
            self.run.still = None
        try:
            record = drawn.step(solver)
        except Exception as raised:
            saved, kept = self.saving, ""
            if saved.checkpoint and saved.k >= 0:
                kept = f", the checkpoint {str(saved.checkpoint.path)!r} is of k = {saved.k}"
            raised.add_note(f"in iteration {len(history) + self.run.start} of fit{kept}")
            raise
        history.append(record)
        failure = self._judge(record)
        self._look(record)  # before the callbacks, so that they know that this was the last
        error: BaseException | None = None
        for callback in self.callbacks:
            if error is not None and not is_late(callback):
                continue  # logs alone have this record too
            try:
                _hook(callback, "step", record, self.state)
            except BaseException as raised:
                error = error or raised
        bar.advance(self._text(record))
        stop = on_any_rank(
            bool(caught), error is not None or failure is not None, bool(self.state.reason), self.saving.late
        )
        interrupted, broken, ended, late = stop
        if interrupted or broken or ended or late or self.saving.due:
            self.saving.save()
        if error is not None:
            raise error
        if failure is not None:
            raise failure
        if broken:
            hear()
        if interrupted:
            raise self._interrupted(caught)
        if ended and not self.state.reason:
            self.state.stop("another rank stopped")
        return True

    def _text(self, record: Record) -> str:
        """An iteration on the progress bar."""
        self.checks += record.upper_checks + record.lower_checks
        self.done += 1
        text = (
            f"f {record.upper_value:.4g}  g {record.lower_value:.4g}  alpha {record.alpha:.2g}  beta {record.beta:.2g}  "
            f"checks {self.checks / self.done:.1f}"
        )
        return "  ".join([text, *(f"{name} {value:.4g}" for name, value in self.state.shown.items())])

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

    def _interrupted(self, caught: list[str]) -> Interrupted:
        what = caught[0] if caught else "an interrupt on another rank"
        text = f"{what} at k = {self.run.solver.k} of {self.state.steps}{self.saving.remedy}"
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
        self.saving.end()
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


def _hook(callback: Any, name: str, *arguments: Any) -> None:
    hook: Callable[..., Any] | None = getattr(callback, name, None)
    if hook is not None:
        hook(*arguments)


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
