"""One outer iteration: lower level -> hypergradient -> direction -> line -> step. What to do when a part of it fails."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from bisls._check import optional, require_argument, settled, whole_number
from bisls.agreement import agree, agree_on_parameters
from bisls.arrays import naming_arrays
from bisls.batches import Sample
from bisls.directions.base import Direction
from bisls.hypergrad.base import Hypergradient, HypergradientMethod, must_solve_kinks
from bisls.linear.base import LinearSolver
from bisls.lower import Ended, LowerPart, begin, told
from bisls.operators import Learnt
from bisls.oracle import Oracle
from bisls.paced import Paced
from bisls.parts import check_together, lower_part, part
from bisls.problem import Bilevel, must_be_problem
from bisls.ranks import meeting, together
from bisls.record import Record
from bisls.record import SolverError as SolverError
from bisls.response.base import Response
from bisls.sampling import Previous, minibatches, sample_of
from bisls.smooth import Smooth
from bisls.solver_state import StateReader
from bisls.status import Status, worst
from bisls.steps.base import StepRule
from bisls.trend import Trend
from bisls.upper import State, Upper
from bisls.vector import apart, norm
from bisls.views import Choice, View, chosen_in

logger = logging.getLogger(__name__)

_MET = {Status.LOWER_LOST: "had lower steps that led astray"}
LOWER_ITERS = 10  # lower steps an iteration, where nothing says how many


class Solver:
    """A bi-level method as a composition of parts. `BiSLS`, `BiSPS` and `Alternating` are compositions with names.

    One iteration: ``lower_iters`` steps on g, each on its own batch; the hypergradient; a direction; the upper loss along the ray
    in that direction, with y responding; a step by the upper rule.

    What happens when a part fails:

    - *A value that is not finite along a ray* is a failed trial: the search shortens.
    - *A lower loss or gradient that is not finite* ends the lower loop; y goes back to where it was finite.
    - *An upper loss or hypergradient that is not finite* at the present point: x and y go back to the last point where both
      levels were finite, the remembered steps are shortened tenfold, and the record says `Status.NON_FINITE`.
    - *A linear solve that ends early* (negative curvature, divergence): its last finite iterate is used, and the record says so.
    - *A lower loss that ends above where it began*, a hypergradient that is exactly zero although f depends on y, an f that has
      risen for long: the record says so (`Status.LOWER_ROSE`, `NO_INFLUENCE`, `UPPER_ROSE`).
    - *An optimiser of the user's that leads far above where it began, or to a dead model*: y, the optimiser and the buffers of
      modules go back to where they were, x stays, and the record says `Status.LOWER_LOST`.
    - *A search that finds nothing* takes no upper step; the lower loop of the next iteration goes on from the present y.
    - After ``patience`` iterations in a row that could not be completed, because of values that are not finite or of such an
      optimiser: `SolverError`. One that succeeds between them breaks the row only if it begins elsewhere than at the point that
      the others went back to: a problem whose f is infinite at y*(x) ends so.

    Nothing that is not finite is ever written into the parameters; an exception in a loss, or an interrupt, leaves them as
    they were before the iteration.

    Args:
        problem: The problem.
        direction: Turns the hypergradient into a direction.
        response: What y does along the upper ray.
        hypergrad: Estimates the hypergradient.
        upper_step: Chooses alpha.
        lower_step: Chooses beta; what it remembers is carried over from one lower loop to the next.
        lower_iters: T, lower steps an iteration, at least 1. None: as many as there are batches where `step` is given a list, 10
            otherwise.
        lower_tol: End the lower loop where ||grad_y g|| on its batch is at most this; None runs all T steps. For
            deterministic lower problems.
        lower_average: Where every lower step has a batch of its own, use the running mean of the lower iterates as y: the
            hypergradient, the trial points and the parameters see the mean, the lower steps go on from the last iterate.
        search_every: Where an independent batch judges the step, search in one iteration of so many, and take the step found
            last in the others (within what the direction allows, y staying where it is); at least 1. Without noise every
            iteration searches.
        polish: Where the lower data are one batch and the lower loop has not brought its gradient below a tenth of what it was,
            a Newton step by this linear solver follows, if it lowers g. None: never. Not with ``lower_optimizer``.
        patience: How many failed iterations in a row end in an error.
        lower_direction: Turns lower gradients into directions; the gradient itself by default.
        lower_optimizer: A torch optimiser over the lower parameters that takes the lower steps, in place of ``lower_step`` and
            the others that say how; or a part of your own with ``descend``, as `bisls.lower.LowerPart` has it.
    """

    def __init__(
        self,
        problem: Bilevel,
        *,
        direction: Direction,
        response: Response,
        hypergrad: HypergradientMethod,
        upper_step: StepRule,
        lower_step: StepRule | None = None,
        lower_iters: int | None = None,
        lower_tol: float | None = None,
        lower_average: bool = False,
        search_every: int = 1,
        polish: LinearSolver | None = None,
        patience: int = 20,
        lower_direction: Direction | None = None,
        lower_optimizer: torch.optim.Optimizer | LowerPart | None = None,
    ):
        call = type(self).__name__
        must_be_problem(call, problem)
        self.problem = problem
        self.hypergrad: HypergradientMethod = part(call, "hypergrad", hypergrad)
        lower_iters = settled(call, "lower_iters", lower_iters, optional(whole_number(1)))
        search_every = settled(call, "search_every", search_every, whole_number(1))
        patience = settled(call, "patience", patience, whole_number(1))
        self.lower_iters = LOWER_ITERS if lower_iters is None else lower_iters
        self._any_number, self.patience = lower_iters is None, patience
        self.upper: Upper | Paced | Smooth = Upper(
            part(call, "direction", direction),
            part(call, "response", response),
            part(call, "upper_step", upper_step),
            search_every,
        )
        must_solve_kinks(call, "hypergrad", self.hypergrad, problem)
        check_together(call, self.upper.response, self.upper.rule)
        average = None if lower_average is False else lower_average
        own = {"step": lower_step, "direction": lower_direction, "tol": lower_tol, "average": average}
        self.lower = lower_part(call, problem, lower_optimizer, polish, own)
        # as they were made: a part of a user's own may well keep something
        self._parts = View(self.lower, self.hypergrad, self.upper).identity
        self.oracle = Oracle(problem)
        self.k = 0
        self._upper_state: State = {}
        self._lower_state: State = {}
        self._hypergrad_state: State = {}
        self._trend = Trend()  # of the upper loss
        self._failures = 0
        self._previous = Previous()  # the previous upper batch judges the step where no other is given
        self._good: tuple[Tensor, Tensor] | None = None  # the last (x, y) at which both levels were finite
        self._met = 0  # the group of processes that is known to be alike
        self._views: tuple[View, ...] = ()  # where there are several, the measured one is taken
        self._choice = Choice()
        self._estimated: Hypergradient | None = None  # of the present iteration, for the choice

    @together
    def step(
        self, upper_batch: Any, lower_batches: Any, step_batch: Any = None, extra_batches: Sequence[Any] = ()
    ) -> Record:
        """One outer iteration; the parameters are changed in place.

        Args:
            upper_batch: What the upper loss is called with.
            lower_batches: A list has one batch for each lower step, and the hypergradient sees the last one; anything else is
                one batch for all of them.
            step_batch: An independent upper batch that judges the step. Without it the previous upper batch does, unless it holds
                the same numbers: then there is no noise to judge, and the batch judges itself.
            extra_batches: Further lower batches, for a hypergradient that wants such as no lower step has seen
                (`StochasticNeumann`; ``solver.extra_batches`` says how many). With fewer of them the batches of the lower
                steps stand in, from the newest on, again and again.

        Returns:
            What happened, as a `Record`.

        Raises:
            SolverError: ``patience`` iterations in a row failed.
            ValueError: A parameter has been frozen (it no longer requires grad), several processes do not begin with the same
                parameters and the same method, or there is a batch that nobody would look at; x and y are as before.
            RankError: Another process has failed; the message says which, and what it raised.
        """
        self._meet()
        given = step_batch is not None
        self.problem.look_around()
        before = self.oracle.cost.copy()
        if self._views and self._choice.open:
            self._look(self._sample(upper_batch, lower_batches, None, extra_batches))
        sample = self._sample(upper_batch, lower_batches, step_batch, extra_batches)
        x, y = self.problem.x.read(), self._present_y()
        states, undo = (self._upper_state, self._lower_state, self._hypergrad_state, self._good), self.problem.kept()
        learnt = self.oracle.memory.learnt
        good = self._good = self._good or (x, y)
        try:
            with self.oracle.unfrozen(), self.problem.quiet():
                record = self._iterate(sample, x, y)
        except BaseException:
            self._write(x, y)
            undo()
            self._upper_state, self._lower_state, self._hypergrad_state, self._good = states
            self.oracle.memory.learnt = learnt
            raise
        # a batch with bad numbers in it must not judge the next step as well
        keep = self.upper.response.two_samples and not given and record.upper_status is not Status.NON_FINITE
        self._previous.keep(upper_batch if keep else None, sample)
        self.k += 1
        record = replace(record, cost=self.oracle.cost - before)
        if self._views and self._estimated is not None:
            self._see(self._choice.seen(self._estimated, record.linear_status, sample))
        self._estimated = None
        if {record.upper_status, record.lower_status} & {Status.NON_FINITE, Status.LOWER_LOST}:
            undo()  # statistics of batches that led astray
            self._failures += 1
        elif self._failures and any(map(apart, self._good, good)):
            self._failures = 0  # the same point only leads to where the others failed
        if self._failures >= self.patience:
            raise SolverError(
                f"`{type(self).__name__}.step(...)`: {self._failures} iterations in a row "
                f"{_MET.get(record.status, 'met values that are not finite')}. "
                f"{record.advice}. The parameters are at the last point where both losses were finite.",
                record,
            )
        return record

    def _present_y(self) -> Tensor:
        """What the lower parameters hold: where nobody has moved them, the vector that is there is not made again."""
        y = self.problem.y
        return self._good[1] if self._good is not None and y.holding(self._good[1]) else y.read()

    def _meet(self) -> None:
        """Before the first step with other processes: what must be the same on all of them is."""
        here = meeting()
        if here != self._met:
            call = f"{type(self).__name__}.step"
            agree(call, method=self.identity, k=self.k, lower_optimizer=self.lower.settings)
            agree_on_parameters(f"{call}(...)", self.problem.levels, cure="; `fit(..., broadcast=True)` does so")
        self._met = here

    def _sample(self, upper: Any, lower: Any, judge: Any, extra: Sequence[Any]) -> Sample:
        call = f"{type(self).__name__}.step"
        wanted = isinstance(extra, list | tuple) and (not extra or self.hypergrad.several)
        rule = "must be lower batches in a list, for a hypergradient that looks at several (StochasticNeumann)"
        require_argument(call, "extra_batches", extra, wanted, rule)
        lower = upper if lower is None and self.problem.lower_start is not None else lower  # they belong together
        batches = minibatches(call, lower, self.lower_iters, self._any_number)
        if self._views and not self.upper.response.two_samples:
            judge = None  # another view would have had a use for it
        previous = self._previous if self.problem.lower_start is None else Previous()  # that one was of other tasks
        return sample_of(call, upper, batches, judge, extra, previous, self.upper.response)

    @torch.no_grad()  # the oracle records what it needs; nothing else does
    def _iterate(self, sample: Sample, x: Tensor, y: Tensor) -> Record:
        with naming_arrays(f"{type(self).__name__}.step", sample.upper, sample.lower.newest):
            y, began = begin(self.oracle, self.lower, sample, y, self.k, self._lower_state)
            following = self.hypergrad.following or self.upper.response.retraces
            lowered = self.lower.descend(self.oracle, sample.lower, y, self.k, began.state, trace=following)
            lowered = replace(lowered, began=began)
            self._lower_state = lowered.state
            self._estimated = estimate = self.hypergrad.after(self.oracle, sample, lowered, self._hypergrad_state)
        ended = Ended.at(self.oracle, sample.lower, estimate.graph)
        record = Record(
            k=self.k,
            upper_value=estimate.value,
            lower_value=ended.value,
            alpha=0.0,
            beta=lowered.step,
            upper_checks=0,
            lower_checks=lowered.checks,
            hypergrad_norm=norm(estimate.flat),
            residual=estimate.residual,
            lower_steps=lowered.steps,
            lower_grad_norm=estimate.lower_grad_norm,
            lower_status=lowered.status,
            linear_status=estimate.status,
            view=self.hypergrad.view,
        )
        steep = estimate.graph is not None and not isfinite(record.lower_grad_norm)
        if steep or not isfinite(ended.value):
            return self._go_back(replace(record, lower_status=Status.NON_FINITE))
        if not (isfinite(estimate.value) and isfinite(record.hypergrad_norm)):
            return self._go_back(record)
        if lowered.lost(self.oracle, ended, y):
            return self._undone(replace(record, lower_status=Status.LOWER_LOST), x, y)
        if lowered.rose(self.oracle, sample.lower, ended, y):
            record = replace(record, lower_status=worst(lowered.status, Status.LOWER_ROSE))
        self._good = (x, lowered.y)
        self._hypergrad_state = estimate.state
        uninfluenced = estimate.uninfluenced(self.oracle, sample.upper, sample.lower.newest)
        level, call = (self.hypergrad, estimate, self.lower, lowered), type(self).__name__
        taken = self.upper.take(self.oracle, sample, *level, x, self.k, self._upper_state, call)
        self._upper_state = taken.state
        returned = taken.status is Status.RETURNED
        self._lower_state = told(self.lower, lowered, self.problem.y.read(), estimate.effect, returned)
        self._trend = self._trend.with_value(estimate.value)
        noticed = Status.NO_INFLUENCE if uninfluenced else Status.UPPER_ROSE if self._trend.risen else Status.OK
        upper, linear = worst(taken.status, noticed), worst(estimate.status, taken.linear)
        return replace(
            record,
            alpha=taken.alpha,
            upper_checks=taken.checks,
            upper_status=upper,
            linear_status=linear,
            status=worst(upper, record.lower_status, linear),
        )

    def _offer(self, *views: View) -> None:
        """Other parts than those it was made of: one view, or several of which the measured one is taken."""
        self._views = views if len(views) > 1 else ()
        self.lower, self.hypergrad, self.upper = views[0].lower, views[0].hypergrad, views[0].upper
        self._parts = "; ".join(view.identity for view in views)

    def _look(self, sample: Sample) -> None:
        """Before an iteration: which view it is to be, where that is open."""
        arrays = naming_arrays(f"{type(self).__name__}.step", sample.upper, sample.lower.newest)
        with self.oracle.unfrozen(), self.problem.quiet(), torch.no_grad(), arrays:
            self._see(self._choice.before(self.oracle, sample))

    def _see(self, choice: Choice) -> None:
        """Take the view that was chosen; one that is new begins with what the other knows of y alone."""
        view, self._choice = self._views[choice.chosen], choice
        if view.hypergrad is self.hypergrad and view.lower is self.lower:
            return
        if self.k > 0:
            logger.info("at k = %d: from now on the %s view", self.k, view.name)
        self._lower_state = self._lower_state if view.lower is self.lower else {}
        self.lower, self.hypergrad, self.upper = view.lower, view.hypergrad, view.upper
        self._upper_state, self._hypergrad_state = {}, {}

    def _go_back(self, record: Record) -> Record:
        """The present point is of no use: return to the last good one, and be more careful from there."""
        assert self._good is not None
        self._write(*self._good)
        self._upper_state = self.upper.careful(self._upper_state)
        self._lower_state = self.lower.careful(self._lower_state)
        return replace(record, upper_status=Status.NON_FINITE, status=Status.NON_FINITE)

    def _undone(self, record: Record, x: Tensor, y: Tensor) -> Record:
        """The lower steps led astray: back to where they began; the second time in a row to the last good point."""
        if self._failures:
            return replace(self._go_back(record), upper_status=Status.OK, status=Status.LOWER_LOST)
        self._write(x, y)
        self._lower_state = self.lower.careful(self._lower_state)
        return replace(record, status=Status.LOWER_LOST)

    def _write(self, x: Tensor, y: Tensor) -> None:
        self.problem.x.write_(x)
        self.problem.y.write_(y)

    def state_dict(self) -> dict[str, Any]:
        """All that the next iteration depends on beside the parameters: numbers and tensors, safe to load without code."""
        return {
            "method": self.identity,
            "k": self.k,
            "upper": dict(self._upper_state),
            "lower": dict(self.lower.saved(self._lower_state)),
            "hypergrad": dict(self._hypergrad_state),
            "trend": self._trend.packed(),
            "failures": self._failures,
            "last_batch": self._previous.packed(),
            "good": None if self._good is None else list(self._good),
            "choice": self._choice.packed(),
            "learnt": self.oracle.memory.learnt.packed(),
            "steady": self._previous.steady.mark,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken. The parameters themselves are the caller's to restore.

        Raises:
            ValueError: It is the state of another method or another problem, none at all, or holds what no solver writes
                (numbers that are not finite, or out of range, other shapes); nothing was loaded.
        """
        call, chosen = type(self).__name__, chosen_in(state, len(self._views))
        view = self._views[chosen] if chosen >= 0 else View(self.lower, self.hypergrad, self.upper)
        own = StateReader(call, self.identity, self.problem, view).read(state)  # all is read before anything is changed
        self.lower, self.hypergrad, self.upper = view.lower, view.hypergrad, view.upper
        self._choice = Choice.unpacked(own["choice"])
        self.oracle.memory.learnt = Learnt.unpacked(own["learnt"])
        self.k, self._failures, self._trend = own["k"], own["failures"], Trend.unpacked(own["trend"])
        self._good = None if own["good"] is None else (own["good"][0], own["good"][1])
        self._upper_state, self._lower_state, self._hypergrad_state = own["upper"], own["lower"], own["hypergrad"]
        self._previous.load(own["last_batch"], own["steady"])
        self._met = 0

    @property
    def two_samples(self) -> bool:
        """Whether an independent upper batch that judges the step is of use."""
        return any(view.upper.response.two_samples for view in self._views) or self.upper.response.two_samples

    @property
    def extra_batches(self) -> int:
        """How many lower batches `step` should be given beside those of the lower steps."""
        return self.hypergrad.extra_batches

    @property
    def measured(self) -> tuple[Tensor, Tensor] | None:
        """The (x, y) that the losses of the last record belong to: before the upper step, after the lower ones."""
        return self._good

    @property
    def identity(self) -> str:
        """What tells this method from another: its parts and their settings, those at their defaults left out."""
        iters = "" if self.lower_iters == LOWER_ITERS else f", lower_iters={self.lower_iters}"
        return f"Solver({self._parts}{iters})"

    def __repr__(self) -> str:
        names = ("upper", "lower", "hypergrad", "lower_iters")
        return f"{type(self).__name__}({', '.join(f'{name}={getattr(self, name)!r}' for name in names)})"
