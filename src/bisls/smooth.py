"""The upper step where there is no noise: as everywhere else while f falls fast, quasi-Newton steps when it no longer does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from math import inf, sqrt
from typing import Any

import torch
from torch import Tensor

from bisls.batches import Sample
from bisls.directions.base import Heading
from bisls.directions.denoised import Denoised
from bisls.directions.lbfgs import two_loops
from bisls.hypergrad.base import Hypergradient, HypergradientMethod
from bisls.line import Line
from bisls.linear.base import LinearSolver
from bisls.lower import Lowered, LowerPart
from bisls.oracle import LowerGraph, Oracle
from bisls.response.base import Ray, Response, Scene
from bisls.response.solved import on_solutions
from bisls.states import Fields, Number, Whole, flat
from bisls.status import Status
from bisls.steps.armijo import Armijo, Restart
from bisls.steps.base import Memory, Step
from bisls.upper import REACH, State, Taken, Upper, arrive, bent
from bisls.vector import Vector, dot, finite

SLOW = 0.01  # f falls slowly where two iterations bring less than twice so much of all that was gained
HISTORY = 10  # pairs of moves and turns
GROW = 2.0  # a step is at most so many times the last one
LONGER = 8.0  # and where that has cut it and f goes on falling, so many times what was left of it
CURVED = 0.01  # a pair, or a direction, with a smaller cosine than this says nothing
SHORTER = 0.25  # after a step that raised f, or a search that found none, the next is at most so long
SETTLE = 0.5  # and so long after one that was too short to be seen in f: noise of rounding must not lead away
KEPT = 0.5  # but where it leaves at least this share of the slope, it was only too short
CUT = 2  # what says of such a step that a limit has cut it
ROUNDING = 8.0  # a rise of f by so many units in its last place is none
SEARCH = Armijo(start=1.0, sufficient=0.1, restart=Restart(), max_checks=20, f_min=None)


@dataclass(frozen=True)
class Smooth:
    """Where nothing is noise, quasi-Newton steps once f falls slowly; before that, and with noise, another upper part.

    Steps along a scaled gradient zigzag near a solution, where quasi-Newton steps (limited-memory BFGS, on Adam's scaling)
    do not. Far from it scaled gradients move all coordinates alike, and do better than models of a curvature that is not
    there. So they begin when two iterations bring less than 2 % of what all have brought. What keeps them from running away:

    - no step is longer than twice the last one, in the metric of the scaling, unless f goes on falling beyond it;
    - f is searched along the ray with the lower problem solved at every trial, where that is cheap (`on_solutions`);
    - an f that has risen by the next iteration leads x and y back, to go on with a quarter of that step;
    - a pair counts where its curvature is clearly positive, and where no step was found the other part takes one.

    Args:
        upper: The other part, with a `Denoised` direction that scales.
        linear: Makes Newton steps on g at trial points.
    """

    upper: Upper
    linear: LinearSolver

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
        """One step from (x, y), y as the lower level left it; the arguments are those of `Upper.take`."""
        others = {name: own for name, own in state.items() if name != "past"}
        scene = Scene(oracle, method, estimate, estimate.flat, x, lowered.y, sample, lower, lowered, 1.0, inf)
        past = None
        if _still(scene):
            steady = sample.lower.steady and "past" in state and "direction" in state
            past = Past.unpacked(state["past"]) if steady else None
            past = past if past is not None and torch.equal(past.end, x) else None  # nobody else has moved x
            if past is None:
                past = Past.begun(scene)
            else:
                heading, direction = self._heading(estimate.flat, x, others)
                scale = self.direction.scaling(direction)
                length = past.length(x, scale)
                slack = ROUNDING * scene.here.eps * abs(past.value)
                if past.on and length > 0.0 and estimate.value > past.value + slack:
                    return _back(scene, past, scale, others)
                way = x - past.x
                moved = float(way.abs().max())
                pairs = scale.dtype == x.dtype  # otherwise squares are beyond this precision, and products of pairs too
                # a step that was cut may have been too short to be seen for that alone: then the slope is much as it was
                seen = past.rounded == CUT and dot(estimate.flat, way) < KEPT * dot(past.gradient, way) < 0.0
                past = past.seen(scene, scale, length if pairs else 0.0)
                grow = GROW if seen or not past.rounded else SETTLE
                limits = (grow * length, grow * moved) if length > 0.0 else (past.limit, past.widest)
                if pairs and past.on and limits[0] > 0.0:
                    return self._step(scene, past, heading, direction, scale, limits, others)
        taken = self.upper.take(oracle, sample, method, estimate, lower, lowered, x, k, others, call)
        return taken if past is None else _kept(taken, past, oracle.problem.x)

    @property
    def response(self) -> Response:
        """That of the other part."""
        return self.upper.response

    @property
    def direction(self) -> Denoised:
        """That of the other part."""
        assert isinstance(self.upper.direction, Denoised)
        return self.upper.direction

    def careful(self, state: State) -> State:
        """The state to go on from after values that were not finite: without what was learnt of the curvature."""
        return self.upper.careful({name: own for name, own in state.items() if name != "past"})

    def keeps(self, x: Vector, y: Vector, method: HypergradientMethod) -> Fields:
        """That of the other part, and what is known of the last iteration."""
        return self.upper.keeps(x, y, method).more(past=Past.kind(x, y))

    def _heading(self, gradient: Tensor, x: Tensor, state: State) -> tuple[Tensor, State]:
        """The scaled gradient, and the state of the direction with it."""
        heading = self.direction.head(gradient, x, state["direction"])
        assert heading.weigh is not None
        own = dot(gradient, heading.search)
        return heading.search, heading.weigh(own, own)[1]

    def _step(
        self,
        scene: Scene,
        past: Past,
        scaled: Tensor,
        direction: State,
        scale: Tensor,
        limits: tuple[float, float],
        state: State,
    ) -> Taken:
        """A step no longer than the limit, unless f goes on falling there."""
        bounds, reach = scene.oracle.problem.upper_bounds, inf
        held = None if bounds is None else bounds.held(scene.x, past.gradient, scene.oracle.problem.x)
        unseen = 2.0 * scene.here.eps * abs(past.value)
        d, cut = past.direction(scaled, scale, limits, held, unseen)
        heading = Heading(d, d)
        if bounds is not None:
            reach = REACH
            heading = bent(scene.oracle, heading, reach, scene.x)
        scene = replace(scene, search=heading.search, max_step=reach)
        ray = self.response.ray(scene, state.get("response", {}))
        graph = scene.estimate.graph
        assert isinstance(graph, LowerGraph)
        exact = on_solutions(scene, graph, ray, self.linear)
        step = _searched(exact, reach)
        if exact is ray or step.status is not Status.NON_FINITE:
            ray = exact
        else:  # g could not be solved anywhere on it
            step = _searched(ray, reach)
        # after one that came to nothing it would only lead there again
        if cut and past.limit == 0.0 and step.size == 1.0 and step.status is Status.OK:
            step = _longer(ray.line, step)
        alpha, y, checked = arrive(scene, ray, heading, step)
        kept = {**state, "direction": direction, "response": {**ray.state, **checked}}
        taken = Taken(y, alpha, step.checks, step.status, ray.status, kept)
        if alpha == 0.0:
            past = past.shortened(limits)
        elif torch.equal(scene.oracle.problem.x.read(), scene.x):  # too short for the numbers of x
            past = replace(past, limit=limits[0] / SHORTER, widest=limits[1] / SHORTER)
        return _kept(taken, past, scene.oracle.problem.x, cut)


@dataclass(frozen=True)
class Past:
    """What is known of the iterations before.

    Attributes:
        x: The last x,
        gradient: the hypergradient there,
        y: the lower solution there,
        value: and f.
        end: Where the step from there led.
        before: f one iteration earlier.
        first: f at first.
        count: How many iterations these are.
        moves: By how much x moved in some of the last iterations,
        turns: and by how much the hypergradient changed.
        limit: How long the next step may be where the last one came to nothing,
        widest: and how far it may go in each coordinate.
        on: Whether f falls slowly by now.
        rounded: Whether the last step was too short to be seen in f: 1, or `CUT`.
    """

    x: Tensor
    gradient: Tensor
    y: Tensor
    value: float
    end: Tensor
    before: float
    first: float
    count: int
    moves: Tensor
    turns: Tensor
    limit: float = 0.0
    widest: float = 0.0
    on: int = 0
    rounded: int = 0

    @classmethod
    def begun(cls, scene: Scene) -> Past:
        """At the first iteration."""
        x, gradient, value = scene.x, scene.estimate.flat, scene.estimate.value
        none = x.new_zeros(0, len(x))
        return cls(x, gradient, scene.y, value, x, value, value, 1, none, none)

    def length(self, x: Tensor, scale: Tensor) -> float:
        """How far it is from the last x, in the metric of the scaling."""
        way = (x - self.x).to(scale.dtype)
        return sqrt(dot(way, way * scale))

    def seen(self, scene: Scene, scale: Tensor, length: float) -> Past:
        """With another iteration."""
        x, gradient, value = scene.x, scene.estimate.flat, scene.estimate.value
        moves, turns = self.moves, self.turns
        move, turn = x - self.x, gradient - self.gradient
        if length > 0.0 and dot(move, turn) > CURVED * length * sqrt(dot(turn, turn / scale)):
            moves, turns = torch.cat([moves, move[None]])[-HISTORY:], torch.cat([turns, turn[None]])[-HISTORY:]
        slow = self.count > 2 and self.before - value <= 2 * SLOW * (self.first - min(value, self.value))
        return Past(
            x,
            gradient,
            scene.y,
            value,
            self.end,
            self.value,
            self.first,
            self.count + 1,
            moves,
            turns,
            0.0 if length > 0.0 else self.limit,
            0.0 if length > 0.0 else self.widest,
            int(self.on or slow),
            self.rounded,
        )

    def direction(
        self, scaled: Tensor, scale: Tensor, limits: tuple[float, float], held: Tensor | None, unseen: float
    ) -> tuple[Tensor, bool]:
        """The quasi-Newton direction, or the scaled gradient where that is none; and whether the limits have cut what f can tell.

        Args:
            scaled: The scaled gradient.
            scale: The scaling.
            limits: How long it may be: in the metric of the scaling, and in each coordinate.
            held: Where x sits on a bound: nothing moves there, and the curvature is that of the rest.
            unseen: A slope whose whole gain f can't tell from its rounding.
        """
        gradient, moves, turns = self.gradient, self.moves, self.turns
        if held is not None:
            gradient, scaled = gradient.masked_fill(held, 0.0), scaled.masked_fill(held, 0.0)
            moves, turns = moves.masked_fill(held, 0.0), turns.masked_fill(held, 0.0)
            kept = (moves * turns).sum(1) > CURVED * (moves * moves * scale).sum(1).sqrt() * (
                turns * turns / scale
            ).sum(1).sqrt()
            moves, turns = moves[kept], turns[kept]
        if len(moves):
            d = two_loops(gradient, moves, turns, scale)
            length, slope = sqrt(dot(d, d * scale)), dot(d, gradient)
            if finite(d) and slope > CURVED * length * sqrt(dot(gradient, scaled)):
                share = _share(d, scale, limits)
                return (d, False) if share >= 1.0 else (d * share, slope > unseen)
        return scaled * _share(scaled, scale, limits), True

    def shortened(self, limits: tuple[float, float]) -> Past:
        """After a step that came to nothing: the next is to be shorter, and what was learnt of the curvature is dropped."""
        none = self.moves[:0]
        return replace(self, moves=none, turns=none, limit=SHORTER * limits[0], widest=SHORTER * limits[1])

    def packed(self) -> dict[str, Any]:
        """Tensors and numbers, for a checkpoint."""
        return {own.name: getattr(self, own.name) for own in fields(self)}

    @classmethod
    def unpacked(cls, state: Mapping[str, Any]) -> Past:
        """What `packed` gave."""
        return cls(**state)

    @staticmethod
    def kind(x: Vector, y: Vector) -> Fields:
        """What `packed` may be."""
        pairs = replace(flat(x), shape=((0, HISTORY), x.numel))
        vectors = {"x": flat(x), "gradient": flat(x), "y": flat(y), "end": flat(x), "moves": pairs, "turns": pairs}
        numbers = {
            "value": Number(),
            "before": Number(),
            "first": Number(),
            "limit": Number(0.0),
            "widest": Number(0.0),
        }
        return Fields({**vectors, **numbers, "count": Whole(1), "on": Whole(), "rounded": Whole()})


def _still(scene: Scene) -> bool:
    """Whether nothing random was met: one batch a level, and losses that draw no numbers."""
    graph, upper, sample = scene.estimate.graph, scene.estimate.upper, scene.sample
    if sample.judged or sample.lower.several or not isinstance(graph, LowerGraph) or upper is None or not upper.whole:
        return False
    return not (graph.random or upper.moment.passed)


def _share(d: Tensor, scale: Tensor, limits: tuple[float, float]) -> float:
    """The share of a direction that is as long as the limits allow: in the metric of the scaling, and in each coordinate."""
    lengths = sqrt(dot(d, d * scale)), float(d.abs().max())
    return min(limit / length if length > 0.0 else 1.0 for limit, length in zip(limits, lengths, strict=True))


def _kept(taken: Taken, past: Past, x: Vector, cut: bool = False) -> Taken:
    past = replace(past, end=x.read(), rounded=(CUT if cut else 1) if taken.status is Status.ROUNDING else 0)
    return replace(taken, state={**taken.state, "past": past.packed()})


def _back(scene: Scene, past: Past, scale: Tensor, state: State) -> Taken:
    """Back to where f was lower, for a shorter step."""
    problem = scene.oracle.problem
    problem.x.write_(past.x)
    problem.y.write_(past.y)
    limits = past.length(scene.x, scale), float((scene.x - past.x).abs().max())
    taken = Taken(past.y, 0.0, 0, Status.RETURNED, Status.OK, state)
    return _kept(taken, past.shortened(limits), problem.x)


def _searched(ray: Ray, reach: float) -> Step:
    """The step along a ray: never beyond 1, not even to be seen in f."""
    return SEARCH.choose(replace(ray.line, max_step=min(1.0, reach)), Memory())


def _longer(line: Line, step: Step) -> Step:
    """A step that a limit has cut, doubled for as long as f falls by half of what its slope promises."""
    t, value, checks = step.size, step.value or 0.0, step.checks
    while 2 * t <= min(LONGER, line.max_step):
        longer, checks = line.at(2 * t), checks + 1
        if not longer < value - line.rounding or longer > line.value + t * line.slope:
            break
        t, value = 2 * t, longer
    return replace(step, size=t, value=value, checks=checks)
