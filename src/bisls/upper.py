"""The upper step: the direction of the hypergradient, the upper loss along it, how far to go, and where y goes with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from torch import Tensor

from bisls.batches import Sample
from bisls.bounds import inside
from bisls.directions.base import Direction, Heading
from bisls.hypergrad.base import Hypergradient, HypergradientMethod
from bisls.lower import Lowered, LowerPart
from bisls.oracle import Oracle
from bisls.parts import check_searchable
from bisls.response.base import Ray, Response, Scene
from bisls.response.frozen import Frozen
from bisls.states import Fields
from bisls.status import Status
from bisls.steps.base import Memory, Step, StepRule
from bisls.vector import Vector, dot

State = Mapping[str, Any]  # numbers, tensors and mappings of these, so that it can be saved
REACH = 4.0  # inside bounds a ray is laid out for so many times the last step


@dataclass(frozen=True)
class Taken:
    """What an upper step did; the parameters are where it ended.

    Attributes:
        y: Where y went with x.
        alpha: The step taken; 0 where none was.
        checks: Trial points along the ray.
        status: How the search ended.
        linear: How the response's own linear solve ended.
        state: What the next step goes on from.
    """

    y: Tensor
    alpha: float
    checks: int
    status: Status
    linear: Status
    state: State


@dataclass(frozen=True)
class Upper:
    """Direction, response and step rule of the upper level.

    Args:
        direction: Turns the hypergradient into a direction.
        response: What y does along the ray.
        rule: Chooses the step.
        search_every: Where an independent batch judges, search in one iteration of so many.
    """

    direction: Direction
    response: Response
    rule: StepRule
    search_every: int = 1

    def take(
        self,
        oracle: Oracle,
        sample: Sample,
        method: HypergradientMethod,
        estimate: Hypergradient,
        lower: LowerPart,
        lowered: Lowered,
        x: Tensor,
        k: int,
        state: State,
        call: str = "Solver",
    ) -> Taken:
        """One step from (x, y), y as the lower level left it.

        Args:
            oracle: Evaluates both losses.
            sample: The batches of the iteration.
            method: The hypergradient method.
            estimate: The hypergradient at (x, y).
            lower: What trains y.
            lowered: What it did.
            x: The upper variable, flat.
            k: The outer iteration.
            state: That of the last `Taken`, or empty.
            call: Who asks, for messages.
        """
        memory = Memory.unpacked(state.get("memory", {}))
        heading = self.direction.head(estimate.flat, x, state.get("direction", {}))
        if self.rule.scheduled and heading.unsearched is not None:
            heading = heading.unsearched
        reach = inf if oracle.problem.upper_bounds is None else _reach(estimate, heading.search, memory)
        heading = bent(oracle, heading, reach, x)
        # with noise a search says little about one step and much about many: it is made once in so many iterations
        due = memory.step is None or k % self.search_every == 0
        rests = sample.judged and not due and self.rule.rests
        sample = replace(sample, judged=sample.judged and not rests)
        scene = Scene(
            oracle=oracle,
            method=method,
            estimate=estimate,
            search=heading.search,
            x=x,
            y=lowered.y,
            sample=sample,
            lower=lower,
            lowered=lowered,
            alpha=memory.step,
            max_step=reach,
        )
        ray = self._ray(scene, rests, state.get("response", {}), call if k == 0 else None)
        line = replace(ray.line, clock=k)
        if heading.weigh is not None:
            own = dot(estimate.flat, heading.search)
            longest, learnt = heading.weigh(own, None if rests else -line.slope if sample.judged else own)
            line, heading = replace(line, max_step=min(line.max_step, longest)), replace(heading, state=learnt)
        step = (self.rule.rest if rests else self.rule.choose)(line, memory)
        alpha, y, checked = arrive(scene, ray, heading, step)
        memory = replace(step.memory, step=alpha) if 0 < alpha < step.size else step.memory
        kept = {"memory": memory.packed(), "direction": heading.state, "response": {**ray.state, **checked}}
        return Taken(y, alpha, step.checks, step.status, ray.status, kept)

    def careful(self, state: State) -> State:
        """The state to go on from after values that were not finite: the remembered step a tenth as long."""
        return {**state, "memory": Memory.unpacked(state.get("memory", {})).shortened().packed()}

    def keeps(self, x: Vector, y: Vector, method: HypergradientMethod) -> Fields:
        """What its state may be: those of its parts. One that failed before its first step has a memory alone."""
        parts = {"direction": self.direction.keeps(x), "response": self.response.keeps(y, method)}
        return Fields({"memory": Memory.kind(self.rule)}, parts, empty=True)

    def _ray(self, scene: Scene, rests: bool, state: State, first: str | None) -> Ray:
        if rests:  # nothing is searched, so nothing is predicted: y stays where the lower level left it
            return replace(Frozen().ray(scene, {}), state=state)
        upper = scene.estimate.upper
        if first and not self.response.follows and upper is not None and not bool(upper.grad_x.any()):
            check_searchable(first, self.response, self.rule)
        return self.response.ray(scene, state)


def bent(oracle: Oracle, heading: Heading, reach: float, x: Tensor) -> Heading:
    """The heading bent so that its ray stays inside the bounds of x."""
    bounds, vector = oracle.problem.upper_bounds, oracle.problem.x
    if bounds is None:
        return heading
    search = inside(bounds, x, heading.search, reach, vector)
    move = search if heading.move is heading.search else inside(bounds, x, heading.move, reach, vector)
    return replace(heading, search=search, move=move)


def _reach(estimate: Hypergradient, search: Tensor, memory: Memory) -> float:
    """How far a ray inside bounds is laid out: a little beyond the last step, at first the Polyak step."""
    if memory.step:
        return REACH * memory.step
    slope = abs(dot(estimate.flat, search))
    return abs(estimate.value) / slope if slope > 0 and estimate.value != 0 else 1.0


def arrive(scene: Scene, ray: Ray, heading: Heading, step: Step) -> tuple[float, Tensor, State]:
    """Write x and y after the step; where it is too long for the response, or not finite, a shorter one or none."""
    problem = scene.oracle.problem
    taken, learnt = ray.trust(step.size) if step.size > 0 else (0.0, {})
    x, y = scene.x, scene.y
    if taken > 0:
        x = scene.x - taken * heading.move
        y = scene.y if ray.follow is None else ray.follow(taken)
        if problem.upper_bounds is not None:  # the rounding of x - t d may cross the bound
            x = problem.upper_bounds.project(x, problem.x)
        if problem.lower_bounds is not None:
            y = problem.lower_bounds.project(y, problem.y)
        if not (problem.x.holds(x) and problem.y.holds(y)):
            x, y, taken = scene.x, scene.y, 0.0
    problem.x.write_(x)
    problem.y.write_(y)
    return taken, y, learnt
