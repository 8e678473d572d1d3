"""Training with nothing set: the steps of `optim.Auto`, for a lower level that is a network."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import isfinite, sqrt
from typing import Any

import torch
from torch import Tensor

from bisls.batches import Minibatches
from bisls.derivatives import Averaged, Derivative, Following, Within
from bisls.lower.base import Lowered, LowerPart, State, TraceStep, lower_line
from bisls.oracle import LowerPoint, Oracle
from bisls.pace import B2, SHARE, Pace
from bisls.states import Fields, Number, counter, flat
from bisls.status import Status
from bisls.steps.base import Memory
from bisls.steps.curvature import Curvature
from bisls.still import Moment
from bisls.vector import Vector, dot, finite, norm

EPS = 1e-8  # added to a root, in units of the gradient
FRESH, OFTEN = 1.25, 30  # the scaling is renewed when so many times as many gradients were seen, or so many more


@dataclass(frozen=True)
class Trained(LowerPart):
    """Adam's scaling, an average, and steps from two measurements: a look at the average now and then, and noise.

    ``z <- z - gamma g / a``, the average a weighted mean of the z's, gradients taken at ``y = average + 0.2 (z - average)``; y is
    what the parameters hold. The rule is that of `optim.Auto`, whose page says why. The scaling a is renewed as squares are
    learnt, but not at every step, so that the steps of an iteration share it.

    Args:
        start: Where the first trials for a step begin; the result hardly depends on it.
    """

    start: float = 1.0

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
        """One step for each batch."""
        run = _Run(self, oracle, y, state, bool(trace), replay)
        with oracle.upper_frozen():
            for batch in batches:
                if not run.step(batch):
                    break
        return run.lowered()

    def rerun(self, oracle: Oracle, batches: Minibatches, lowered: Lowered) -> Tensor | None:
        """The same steps: sizes, weights and scalings as they were."""
        began = lowered.began
        assert began is not None
        with oracle.problem.probing(began.moment), oracle.upper_frozen():
            y = began.start(oracle)
            z, average = y, y
            if began.state:
                shift = y - began.state["y"] if began.y is None else torch.zeros_like(y)
                z, average = began.state["z"] + shift, began.state["average"] + shift
            for taken, batch in zip(lowered.trace, batches, strict=False):
                back = taken.derivative.inner if isinstance(taken.derivative, Within) else taken.derivative
                assert isinstance(back, Averaged)
                gradient = oracle.lower(batch, y).grad
                if not finite(gradient):
                    return None
                z = z - back.factor * gradient
                average = torch.lerp(average, z, back.weight)
                y = _inside(oracle, torch.lerp(average, z, SHARE))
        return y if finite(y) else None

    def anew(self, state: State) -> State:
        """Scaling and steps stay, the path begins anew."""
        return {**state, "fresh": torch.tensor(1)} if state else state

    def followed(self, state: State, before: Tensor, after: Tensor) -> State:
        """Iterate and average move with y."""
        if not state or torch.equal(before, after):
            return state
        shift = after - before
        return {**state, "y": after, "z": state["z"] + shift, "average": state["average"] + shift}

    def careful(self, state: State) -> State:
        """A tenth of the step."""
        if not state:
            return state
        pace = Pace.unpacked(state["pace"])
        return {**state, "pace": replace(pace, ceiling=0.1 * pace.ceiling).packed()}

    def keeps(self, y: Vector | None) -> Fields:
        """Iterate, average, squares, scaling, where it began, and the pace."""
        here = flat(y)
        vectors = dict.fromkeys(("y", "z", "average", "start"), here)
        squares = {name: flat(y, least=0.0) for name in ("squares", "scale")}
        own = {"seen": counter(), "renewed": counter(), "unit": Number(0.0), "pace": Pace.KIND, "accepted": Number(0.0)}
        return Fields({**vectors, **squares, **own}, empty=True)

    def checked(self, state: State) -> State:
        """Read a state from a file."""
        return self.keeps(None).read(state, "state")


class _Run:
    """The steps of one iteration."""

    def __init__(self, own: Trained, oracle: Oracle, y: Tensor, state: State, trace: bool, replay: Moment | None):
        self.own, self.oracle, self.tracing, self.replay = own, oracle, trace, replay
        self.y = self.began = y
        self.trace: list[TraceStep] = []
        self.first: LowerPoint | None = None
        self.last: LowerPoint | None = None
        self.steps, self.checks, self.size, self.promised, self.status = 0, 0, 0.0, 0.0, Status.OK
        self.accepted: float = state.get("accepted", 0.0)
        self.pace = Pace.unpacked(state["pace"]) if state else Pace()
        self.unit: float = state.get("unit", 0.0)
        self.seen, self.renewed = (int(state[name]) if state else 0 for name in ("seen", "renewed"))
        zeros = torch.zeros_like(y)
        self.squares, self.scale = (state.get(name, zeros) for name in ("squares", "scale"))
        self.start: Tensor = state.get("start", y)
        if state and torch.equal(state["y"], y):
            self.z, self.average = state["z"], state["average"]
        elif state and "fresh" not in state:  # somebody else has moved y: iterate and average go with it
            self.z, self.average = state["z"] + (y - state["y"]), state["average"] + (y - state["y"])
        else:
            self.z = self.average = y

    def step(self, batch: Any) -> bool:
        """One step; False where there can be no further one."""
        oracle, here = self.oracle, self.oracle.lower(batch, self.y, self.replay)
        length = dot(here.grad, here.grad)
        if not (isfinite(length) and isfinite(here.value)):
            self.status = Status.NON_FINITE
            self.y = self.z = self.average = self.began
            self.pace = replace(self.pace, ceiling=0.1 * self.pace.ceiling)
            return False
        self.first, self.last = self.first or here, here
        pace = self.pace
        if pace.lost:
            self._begin_anew()
            return False
        if pace.due:
            value = oracle.lower_value(batch, here.moment, self.average)
            self.checks += 1
            pace = pace.voted(here.value, value if isfinite(value) else here.value)
        self.unit = self.unit or (norm(here.grad) / sqrt(here.grad.numel()) or 1.0)
        length /= self.unit**2
        usual = pace.usual(length)
        tamed = self.unit * (sqrt(length / usual) if usual > 0 else 1.0)
        gradient = here.grad / tamed
        self._learn(gradient)
        d = gradient / self.scale
        square = dot(gradient, d)
        if square <= 0.0:
            self.pace = pace
            return True
        if pace.ceiling == 0.0:
            pace = self._first_step(pace, here, batch, d, square)
            if pace.ceiling == 0.0:
                return True
        looked = pace is not self.pace
        size, weight, self.pace = pace.stepped(square, usual)
        before = self.y
        z = self.z - size * d
        average = torch.lerp(self.average, z, weight)
        y = _inside(oracle, torch.lerp(average, z, SHARE))
        if not oracle.problem.y.holds(y):
            self.status, self.pace = Status.NON_FINITE, replace(pace, ceiling=0.1 * pace.ceiling)
            return False
        self.z, self.average, self.y = z, average, y
        if self.tracing:
            self.trace.append(TraceStep(before, batch, here.moment, self._back(size / tamed, weight), size))
        if looked:
            self._measure()
        self.pace = self.pace.noted(here.value)
        self.steps += 1
        self.promised += dot(here.grad, before - y)
        self.size = self.accepted = size
        return True

    def _back(self, size: float, weight: float) -> Derivative:
        back = Averaged(size, weight, SHARE, self.scale)
        if self.oracle.problem.lower_bounds is None:
            return back
        return Within(back, self.y == torch.lerp(self.average, self.z, SHARE))

    def _learn(self, gradient: Tensor) -> None:
        """The squares of a gradient join the mean, and the scaling is renewed where it is due."""
        self.seen += 1
        self.squares = torch.lerp(self.squares, gradient.square(), 1 - B2)
        if self.seen >= min(FRESH * self.renewed, self.renewed + OFTEN):
            self.scale = (self.squares / (1 - B2**self.seen)).sqrt_().add_(EPS)
            self.renewed = self.seen

    def _first_step(self, pace: Pace, here: LowerPoint, batch: Any, d: Tensor, square: float) -> Pace:
        """The ceiling from the step that is best for the first batch."""
        slope = -square * self.unit
        line = lower_line(self.oracle, here, batch, slope, lambda t: _inside(self.oracle, self.y - t * d), None)
        step = Curvature(start=self.own.start).choose(line, Memory())
        self.checks += step.checks
        return pace.begun(step.size)

    def _measure(self) -> None:
        away = self.average - self.start
        reached = sqrt(max(dot(away, away * self.scale), 0.0))
        self.pace = replace(self.pace, distance=max(self.pace.distance, reached))

    def _begin_anew(self) -> None:
        """Back to where the run began, with a tenth of the step."""
        self.status, self.pace = Status.RESTARTED, self.pace.anew()
        self.y = self.z = self.average = self.start
        self.squares, self.seen, self.renewed = torch.zeros_like(self.y), 0, 0
        self.trace.clear()

    def lowered(self) -> Lowered:
        self.oracle.problem.y.write_(self.y)
        state: Mapping[str, Any] = {
            "y": self.y,
            "z": self.z,
            "average": self.average,
            "start": self.start,
            "squares": self.squares,
            "scale": self.scale,
            "seen": torch.tensor(self.seen),
            "renewed": torch.tensor(self.renewed),
            "unit": self.unit,
            "pace": self.pace.packed(),
            "accepted": self.accepted,
        }
        return Lowered(
            y=self.y,
            step=self.size,
            steps=self.steps,
            checks=self.checks,
            status=self.status,
            state=state if self.seen else {},
            accepted=self.accepted,
            first=self.first,
            last=self.last,
            promised=self.promised,
            trace=tuple(self.trace),
        )


def _inside(oracle: Oracle, y: Tensor) -> Tensor:
    bounds = oracle.problem.lower_bounds
    return y if bounds is None else bounds.project(y, oracle.problem.y)
