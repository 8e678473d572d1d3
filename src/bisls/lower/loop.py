"""The lower loop: steps along a direction, by a step rule, with an average and a Newton step where they help."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import isfinite, nan
from typing import Any

import torch
from torch import Tensor

from bisls.batches import Minibatches
from bisls.derivatives import Derivative, Following, Plain, Within
from bisls.directions.base import Direction, Heading
from bisls.directions.steepest import Steepest
from bisls.line import Line
from bisls.linear.base import LinearSolver
from bisls.lower.base import FAR, Lowered, LowerPart, State, TraceStep, freed, lower_line, moved, stepped
from bisls.oracle import LowerPoint, Oracle
from bisls.states import Fields, Number, counter, flat
from bisls.status import Status, worst
from bisls.steps.base import Memory, Step, StepRule
from bisls.steps.constant import Constant
from bisls.still import Moment
from bisls.vector import Vector, dot, norm

BEHIND = 0.1  # a loop that leaves more than this share of its gradient has not solved the lower problem
FORGET = 0.05  # the least weight of a new iterate in the mean


@dataclass(frozen=True)
class Loop(LowerPart):
    """Steps on g from the present y, each along the direction of its own batch's gradient.

    Args:
        rule: Chooses the steps; what it remembers is carried over from one loop to the next.
        direction: Turns gradients into directions; its state is carried over too.
        tol: End where ||grad_y g|| on a batch is at most this; None makes all steps.
        average: Where every step has a batch of its own, y is the running mean of the iterates; the steps go on from the last.
        polish: Where all steps have one batch and have not brought the gradient below a tenth of what it was, a Newton step by
            this linear solver follows, if it lowers g. None: never.
    """

    rule: StepRule
    direction: Direction = field(default_factory=Steepest)
    tol: float | None = None
    average: bool = False
    polish: LinearSolver | None = None

    def descend(
        self,
        oracle: Oracle,
        batches: Minibatches,
        y: Tensor,
        k: int,
        state: State,
        *,
        trace: Following | bool = False,
        replay: Moment | None = None,
    ) -> Lowered:
        """Make the steps, one for each batch."""
        run = _Run(self, oracle, k, state, self.average and batches.several, trace, replay)
        if replay is not None:
            run.steps_on(batches, y)
            return run.lowered()
        with oracle.upper_frozen():
            run.steps_on(batches, y)
        if self.polish is not None and not batches.several and run.behind(len(batches)):
            run.polish(self.polish, batches.newest)
        return run.lowered()

    def repeated(
        self, oracle: Oracle, batches: Minibatches, lowered: Lowered, y: Tensor, moment: Moment | None
    ) -> Tensor | None:
        """Steps of the size accepted last, in the same kind of direction."""
        if lowered.accepted == 0.0:  # no step was ever taken
            return y
        loop = Loop(Constant(lowered.accepted), self.direction)
        state = {"direction": lowered.state["direction"]}
        again = loop.descend(oracle, batches, y, 0, state, replay=moment)
        return None if again.status is Status.NON_FINITE else again.y

    def rerun(self, oracle: Oracle, batches: Minibatches, lowered: Lowered) -> Tensor | None:
        """Steps of the sizes that were taken."""
        began = lowered.beginning
        taken = _Taken(tuple(step.size for step in lowered.trace), self.rule.scheduled)
        state = {"direction": began.state.get("direction", {})}
        with oracle.problem.probing(began.moment):
            again = Loop(taken, self.direction).descend(oracle, batches, began.start(oracle), began.k, state)
        return None if again.status is Status.NON_FINITE else again.y

    def anew(self, state: State) -> State:
        """Steps are remembered, momentum and averages are not."""
        return {**state, "direction": {}, "average": {}} if state else state

    def followed(self, state: State, before: Tensor, after: Tensor) -> State:
        """The mean lies at the y that was moved, and the last iterate moves with it."""
        average = state.get("average")
        if not average:
            return state
        return {**state, "average": {**average, "mean": after, "last": average["last"] + (after - before)}}

    def careful(self, state: State) -> State:
        """The remembered step a tenth as long, no average."""
        memory = Memory.unpacked(state.get("memory", {}))
        return {**state, "memory": memory.shortened().packed(), "average": {}}

    def keeps(self, y: Vector | None) -> Fields:
        """What rule and direction keep, the average, and the last step that was taken."""
        own = {"last": flat(y), "mean": flat(y), "n": counter()}
        parts = {"memory": Memory.kind(self.rule), "direction": self.direction.keeps(y)}
        average = Fields(own, empty=True) if self.average else Fields()
        return Fields({**parts, "average": average, "accepted": Number(0.0)}, empty=True)

    def checked(self, state: State) -> State:
        """Read a state from a file."""
        return self.keeps(None).read(state, "state")


@dataclass(frozen=True)
class _Taken(StepRule):
    """Steps of sizes that were taken before, one after another; none after the last."""

    sizes: tuple[float, ...]
    settled: bool

    @property
    def scheduled(self) -> bool:
        return self.settled

    def choose(self, line: Line, memory: Memory) -> Step:
        return self.blind(line.slope, 0, memory)

    def blind(self, slope: float, k: int, memory: Memory) -> Step:
        return Step(self.sizes[memory.k] if memory.k < len(self.sizes) else 0.0, memory.later())


class _Run:
    """One loop under way."""

    def __init__(
        self,
        loop: Loop,
        oracle: Oracle,
        k: int,
        state: State,
        averages: bool,
        trace: Following | bool,
        replay: Moment | None,
    ):
        self.loop, self.oracle, self.k, self.averages, self.replay = loop, oracle, k, averages, replay
        self.memory = Memory.unpacked(state.get("memory", {}))
        self.heading_state: State = state.get("direction", {})
        self.average: State = state.get("average", {}) if averages else {}
        self.accepted: float = state.get("accepted", 0.0)
        self.following = Following.of(trace)
        self.trace: list[TraceStep] = []
        self.point: LowerPoint | None = None  # before the last step
        self.first_point: LowerPoint | None = None
        self.step, self.steps, self.checks, self.status = 0.0, 0, 0, Status.OK
        self.first = self.last = self.promised = 0.0  # gradient norms at the beginning and before the last step

    def steps_on(self, batches: Minibatches, y: Tensor) -> None:
        oracle, rule, direction, tol = self.oracle, self.loop.rule, self.loop.direction, self.loop.tol
        vector, plain = oracle.problem.y, direction.plain
        scheduled, heading, last = rule.scheduled, None, len(batches) - 1
        y = before = self._last_iterate(y)
        for i, batch in enumerate(batches):
            here = oracle.lower(batch, y, self.replay)
            grad = freed(oracle, here.grad, y)
            search = move = grad
            square = dot(search, search)
            slope, step = -square, None
            if isfinite(square):
                if not plain:
                    heading = direction.head(grad, y, self.heading_state)
                    if scheduled and heading.unsearched is not None:
                        heading = heading.unsearched
                    search, move = heading.search, heading.move
                    slope = -dot(grad, search)
                step = rule.blind(slope, self.k, self.memory)
            if not isfinite(square) or (step is None and not isfinite(here.value)):
                # the step before led here, or the batch is bad: back to where the loss was finite
                y = self.average["mean"] if self.average else before
                self.average = {}  # the last iterate is of no use: the next loop begins at the mean
                self.memory = self.memory.shortened()
                self.status = Status.NON_FINITE
                break
            self.point, self.last = here, square**0.5
            if self.first_point is None:
                self.first, self.first_point = self.last, here
            if self.averages and i == last:
                self._judge_mean(here, batch)
            if tol is not None and self.last <= tol:
                break
            if step is None:
                step = self._choose(here, batch, y, search, slope)
            self._note(step, slope)
            before, size = y, step.size
            y = moved(oracle, y, move, size)
            if self.following is not None:
                seen = i >= self.following.first(last + 1)
                moves = None if grad is here.grad else grad == here.grad
                back = self._back(heading, move, size, before, y, moves) if seen else None
                self.trace.append(TraceStep(before if seen else None, batch, here.moment, back, size))
            short = plain and size * self.last <= FAR and vector.alike  # too short to lead out of the finite numbers
            if not short and not vector.holds(y):
                y, self.status = before, Status.NON_FINITE
            elif heading is not None:
                self.heading_state = heading.state
            if self.averages:
                self._join_mean(y)
        self.y = self.average["mean"] if self.average else y
        vector.write_(self.y)

    def behind(self, asked: int) -> bool:
        """Whether the loop has done its steps and left too much of its gradient."""
        if self.status in (Status.NON_FINITE, Status.ROUNDING) or self.steps < asked:
            return False
        return self.last > BEHIND * self.first

    def polish(self, linear: LinearSolver, batch: Any) -> None:
        """One Newton step on g, if it lowers g: the loop has left y too far behind."""
        vector = self.oracle.problem.y
        graph = self.oracle.lower_graph(batch)
        y = moved(self.oracle, self.y, linear.solve(graph.hessian, graph.freed(graph.grad), {}).z, 1.0)
        if not vector.holds(y):
            return
        self.checks += 1
        if self.oracle.lower_value(batch, graph.moment, y) < graph.value:
            self.y = y
        vector.write_(self.y)

    def lowered(self) -> Lowered:
        return Lowered(
            y=self.y,
            step=self.step,
            steps=self.steps,
            checks=self.checks,
            status=self.status,
            state={
                "memory": self.memory.packed(),
                "direction": self.heading_state,
                "average": self.average,
                "accepted": self.accepted,
            },
            accepted=self.accepted,
            first=self.first_point,
            left=nan if self.point is None or self.following is None else norm(self.point.grad),
            promised=self.promised,
            trace=tuple(self.trace),
        )

    def _note(self, step: Step, slope: float) -> None:
        self.memory = step.memory
        self.checks += step.checks
        self.steps += 1
        if step.status is not Status.OK:
            self.status = worst(self.status, step.status)
        if step.size > 0:
            self.step = self.accepted = step.size
            self.promised -= step.size * slope

    def _back(
        self,
        heading: Heading | None,
        move: Tensor,
        size: float,
        before: Tensor,
        after: Tensor,
        moves: Tensor | None,
    ) -> Derivative | None:
        """The derivative of the step just taken; ``moves`` says which coordinates did not sit on a bound."""
        assert self.following is not None
        back = Plain(size) if heading is None else heading.back(size, self.following)
        if back is None or self.oracle.problem.lower_bounds is None:
            return back
        free = after == stepped(before, move, size)
        return Within(back, free if moves is None else free & moves)

    def _choose(self, here: LowerPoint, batch: Any, y: Tensor, search: Tensor, slope: float) -> Step:
        line = lower_line(self.oracle, here, batch, slope, lambda t: moved(self.oracle, y, search, t), self.k)
        return self.loop.rule.choose(line, self.memory)

    def _last_iterate(self, y: Tensor) -> Tensor:
        """Where the steps go on: the last iterate, unless somebody else has moved the parameters since."""
        if not self.average or not torch.equal(self.average["mean"], y):
            self.average = {}
            return y
        self.oracle.problem.y.write_(self.average["last"])
        return self.average["last"]

    def _judge_mean(self, here: LowerPoint, batch: Any) -> None:
        """A mean that is worse than the last iterate, on a batch that neither has seen, lags behind: it begins anew."""
        if self.average and not self.oracle.lower_value(batch, here.moment, self.average["mean"]) < here.value:
            self.average = {}

    def _join_mean(self, y: Tensor) -> None:
        """The last iterate joins the mean; recent ones weigh more, and the mean never forgets more slowly than FORGET."""
        mean = self.average
        n = int(mean["n"]) + 1 if mean else 1
        weight = max(min(1.0, 4.0 / (n + 3)), FORGET)
        now = mean["mean"] + weight * (y - mean["mean"]) if mean else y
        self.average = {"last": y, "mean": now, "n": torch.tensor(n)}
