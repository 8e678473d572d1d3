"""One outer iteration: lower loop -> hypergradient -> direction -> line -> step. What to do when a part of it fails."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import inf, isfinite, nan
from typing import Any

import torch
from torch import Tensor

from bisls._check import require_argument, whole
from bisls.bounds import inside
from bisls.directions.base import Direction, Heading
from bisls.hypergrad.base import Hypergradient, HypergradientMethod, Several
from bisls.line import Line
from bisls.linear.base import LinearSolver
from bisls.oracle import LowerPoint, Oracle
from bisls.player import Outdated
from bisls.problem import Bilevel
from bisls.record import Record, Status, worst
from bisls.response.base import Ray, Response, Scene, State
from bisls.response.frozen import Frozen
from bisls.steps.base import Memory, Step, StepRule
from bisls.vector import dot, norm

logger = logging.getLogger(__name__)


_PARTS = ("direction", "hypergrad", "response", "average")
BEHIND = 0.1  # a lower loop that leaves more than this share of its gradient has not solved the lower problem
FAR = 1e30  # no shorter step can lead out of the finite numbers
FORGET = 0.05  # the least weight of a new lower iterate in the mean


class SolverError(RuntimeError):
    """The solver gave up: the message names the level, what happened and what would help.

    Attributes:
        record: The record of the iteration in which it did.
    """

    def __init__(self, text: str, record: Record):
        super().__init__(text)
        self.record = record


@dataclass
class _Loop:
    """What a lower loop did."""

    point: LowerPoint | None = None  # before its last step
    beta: float = 0.0
    checks: int = 0
    steps: int = 0
    status: Status = Status.OK
    first: float = 0.0  # the gradient norm at its beginning
    last: float = 0.0  # and before its last step


class Solver:
    """A bi-level method as a composition of parts. `BiSLS`, `BiSPS` and `Alternating` are compositions with names.

    One iteration: ``lower_iters`` steps on g, each along the gradient of its own batch; the hypergradient; a direction; the
    upper loss along the ray in that direction, with y responding; a step by the upper rule.

    What happens when a part fails:

    - *A value that is not finite along a ray* is a failed trial: the search shortens.
    - *A lower loss or gradient that is not finite* ends the lower loop; y goes back to where it was finite.
    - *An upper loss or hypergradient that is not finite* at the present point: x and y go back to the last point where both
      levels were finite, the remembered steps are shortened tenfold, and the record says `Status.NON_FINITE`.
    - *A linear solve that ends early* (negative curvature, divergence): its last finite iterate is used, and the record says so.
    - *A search that finds nothing* takes no upper step; the lower loop of the next iteration goes on from the present y.
    - After ``patience`` iterations in a row that could not be completed because of values that are not finite: `SolverError`.

    Nothing that is not finite is ever written into the parameters; an exception in a loss, or an interrupt, leaves them as
    they were before the iteration.

    Args:
        problem: The problem.
        direction: Turns the hypergradient into a direction.
        response: What y does along the upper ray.
        hypergrad: Estimates the hypergradient.
        upper_step: Chooses alpha.
        lower_step: Chooses beta; what it remembers is carried over from one lower loop to the next.
        lower_iters: T, lower steps an iteration, at least 1.
        lower_tol: End the lower loop where ||grad_y g|| on its batch is at most this; None runs all T steps. For
            deterministic lower problems.
        lower_average: Where every lower step has a batch of its own, use the running mean of the lower iterates as y: the
            hypergradient, the trial points and the parameters see the mean, the lower steps go on from the last iterate.
        search_every: Where an independent batch judges the step, search in one iteration of so many, and take the step found
            last in the others (within what the direction allows, y staying where it is); at least 1. Without noise every
            iteration searches.
        polish: Where the lower data are one batch and the lower loop has not brought its gradient below a tenth of what it was,
            a Newton step by this linear solver follows, if it lowers g. None: never.
        patience: How many failed iterations in a row end in an error.
    """

    def __init__(
        self,
        problem: Bilevel,
        *,
        direction: Direction,
        response: Response,
        hypergrad: HypergradientMethod,
        upper_step: StepRule,
        lower_step: StepRule,
        lower_iters: int = 10,
        lower_tol: float | None = None,
        lower_average: bool = False,
        search_every: int = 1,
        polish: LinearSolver | None = None,
        patience: int = 20,
    ):
        call = type(self).__name__
        if not isinstance(problem, Bilevel):
            raise ValueError(f"`{call}(problem={problem!r})`: problem must be a Bilevel(upper_loss, lower_loss, ...)")
        for name, part, method, example in (
            ("direction", direction, "head", "Adam()"),
            ("response", response, "ray", "Tangent()"),
            ("hypergrad", hypergrad, "estimate", "Implicit(CG())"),
            ("upper_step", upper_step, "choose", "Armijo()"),
            ("lower_step", lower_step, "choose", "Armijo()"),
        ):
            fits = callable(getattr(part, method, None)) and not isinstance(part, type)
            require_argument(call, name, part, fits, f"must have a method {method}(...), as {example} has")
        require_argument(call, "lower_iters", lower_iters, whole(lower_iters, 1), "must be a whole number, at least 1")
        small = lower_tol is None or 0 <= lower_tol < float("inf")
        require_argument(call, "lower_tol", lower_tol, small, "must be at least 0, or None")
        often = isinstance(search_every, int) and search_every >= 1
        require_argument(call, "search_every", search_every, often, "must be a whole number, at least 1")
        require_argument(call, "patience", patience, patience >= 1, "must be at least 1")
        self.problem = problem
        self.direction = direction
        self.response = response
        self.hypergrad = hypergrad
        self.upper_step = upper_step
        self.lower_step = lower_step
        self.lower_iters = lower_iters
        self.lower_tol = lower_tol
        self.lower_average = lower_average
        self.search_every = search_every
        self.polish = polish
        self.patience = patience
        self.oracle = Oracle(problem, problem.tape)
        self.k = 0
        self._upper_memory = Memory()
        self._lower_memory = Memory()
        self._beta = 0.0  # the last lower step that was accepted
        self._states: dict[str, State] = {name: {} for name in _PARTS}
        self._failures = 0
        self._loaded = False
        self._last_batch: Any = None  # the previous upper batch judges the step where no other is given
        self._good: tuple[Tensor, Tensor] | None = None  # the last (x, y) at which both levels were finite

    def step(self, upper_batch: Any, lower_batches: Any, step_batch: Any = None) -> Record:
        """One outer iteration; the parameters are changed in place.

        Args:
            upper_batch: What the upper loss is called with.
            lower_batches: A list has one batch for each lower step, and the hypergradient sees the last one; anything else is
                one batch for all of them.
            step_batch: An independent upper batch that judges the step. Without it the previous upper batch does.

        Returns:
            What happened, as a `Record`.

        Raises:
            SolverError: ``patience`` iterations in a row failed.
        """
        batches = self._batches(lower_batches)
        given = step_batch is not None
        if not given:
            step_batch = upper_batch if self._last_batch is None else self._last_batch
            if self._loaded and _equal(step_batch, upper_batch):
                step_batch = upper_batch  # one batch for all iterations, read back as another object
        before = self.oracle.cost.copy()
        x, y = self.problem.x.read(), self.problem.y.read()
        if self._good is None:
            self._good = (x, y)
        memory = (self._upper_memory, self._lower_memory, self._beta, dict(self._states))
        record: Record | None = None
        while record is None:
            try:
                record = self._iterate(upper_batch, batches, step_batch, x, y)
            except BaseException as error:
                self._write(x, y)
                self._upper_memory, self._lower_memory, self._beta, self._states = memory
                if not isinstance(error, Outdated):
                    raise
                # the lower loss is not what it was when it was recorded: the iteration is made again without the tape
                memory = (*memory[:3], dict(memory[3]))
                self.oracle.forget()
        # a batch with bad numbers in it must not judge the next step as well
        keep = self.response.two_samples and not given and record.upper_status is not Status.NON_FINITE
        self._last_batch, self._loaded = upper_batch if keep else None, False
        self.k += 1
        record = replace(record, cost=self.oracle.cost - before)
        self._failures = self._failures + 1 if Status.NON_FINITE in (record.upper_status, record.lower_status) else 0
        if self._failures >= self.patience:
            raise SolverError(
                f"`{type(self).__name__}.step(...)`: {self._failures} iterations in a row met values that are not finite. "
                f"{record.advice}. The parameters are at the last point where both losses were finite.",
                record,
            )
        return record

    @torch.no_grad()  # the oracle records what it needs; nothing else does
    def _iterate(self, upper_batch: Any, batches: list[Any], step_batch: Any, x: Tensor, y: Tensor) -> Record:
        several = self.oracle.anywhere(any(batch is not batches[-1] for batch in batches))
        averages = self.lower_average and several
        if not averages:
            self._states["average"] = {}
        with self.oracle.upper_frozen():
            loop = self._lower_loop(batches, self._last_iterate(y) if averages else y, averages)
        if self.polish is not None and not several and self._behind(loop):
            loop.checks += self._polish(self.polish, batches[-1])
        y = self.problem.y.read()
        lower = Several(batches) if several and getattr(self.hypergrad, "spread", None) is not None else batches[-1]
        estimate = self.hypergrad.estimate(self.oracle, upper_batch, lower, self._states["hypergrad"])
        record = Record(
            k=self.k,
            upper_value=estimate.value,
            lower_value=estimate.graph.value if estimate.graph else nan if loop.point is None else loop.point.value,
            alpha=0.0,
            beta=loop.beta,
            upper_checks=0,
            lower_checks=loop.checks,
            hypergrad_norm=norm(estimate.flat),
            residual=estimate.residual,
            lower_steps=loop.steps,
            lower_grad_norm=estimate.lower_grad_norm,
            lower_status=loop.status,
            linear_status=estimate.status,
        )
        if estimate.graph is not None and not (isfinite(record.lower_value) and isfinite(record.lower_grad_norm)):
            return self._go_back(replace(record, lower_status=Status.NON_FINITE))
        if not (isfinite(estimate.value) and isfinite(record.hypergrad_norm)):
            return self._go_back(record)
        self._good = (x, y)
        self._states["hypergrad"] = estimate.state
        heading = self.direction.head(estimate.flat, x, self._states["direction"])
        reach = inf if self.problem.upper_bounds is None else self._reach(estimate, heading.search)
        heading = self._inside(heading, reach, x)
        # with noise a search says little about one step and much about many: it is made once in so many iterations
        due = self._upper_memory.step is None or self.k % self.search_every == 0
        judged = self.response.two_samples and self.oracle.anywhere(step_batch is not upper_batch)
        # a rule that only looks at value and slope has nothing to rest from
        rest = getattr(self.upper_step, "rest", None)
        rests = judged and not due and rest is not None
        judged = judged and not rests
        scene = Scene(
            oracle=self.oracle,
            method=self.hypergrad,
            estimate=estimate,
            search=heading.search,
            x=x,
            y=y,
            upper_batch=upper_batch,
            step_batch=step_batch if judged else upper_batch,
            judged=judged,
            lower_batch=batches[-1],
            beta=self._beta,
            alpha=self._upper_memory.step,
            max_step=reach,
        )
        if rests:  # nothing is searched, so nothing is predicted: y stays where the lower loop left it
            ray = replace(Frozen().ray(scene, {}), state=self._states["response"])
        else:
            ray = self.response.ray(scene, self._states["response"])
        line = replace(ray.line, clock=self.k)
        if heading.weigh is not None:
            own = dot(estimate.flat, heading.search)
            longest, state = heading.weigh(own, None if rests else -line.slope if judged else own)
            line, heading = replace(line, max_step=min(line.max_step, longest)), replace(heading, state=state)
        step = (rest if rests and rest else self.upper_step.choose)(line, self._upper_memory)
        taken, learnt = self._arrive(scene, ray, heading, step)
        self._upper_memory = step.memory
        if 0 < taken < step.size:
            self._upper_memory = replace(step.memory, step=taken)
        self._states["direction"] = heading.state
        self._states["response"] = {**ray.state, **learnt}
        linear = worst(estimate.status, ray.status)
        status = worst(step.status, loop.status, linear)
        return replace(
            record, alpha=taken, upper_checks=step.checks, upper_status=step.status, linear_status=linear, status=status
        )

    def _last_iterate(self, y: Tensor) -> Tensor:
        """Where the lower steps go on: the last iterate, unless somebody else has moved the parameters since."""
        state = self._states["average"]
        if not state or not torch.equal(state["mean"], y):
            self._states["average"] = {}
            return y
        self.problem.y.write_(state["last"])
        return state["last"]

    def _judge_mean(self, here: LowerPoint, batch: Any) -> None:
        """A mean that is worse than the last iterate, on a batch that neither has seen, lags behind: it begins anew."""
        state = self._states["average"]
        if state and not self.oracle.lower_value(batch, here.moment, state["mean"]) < here.value:
            self._states["average"] = {}

    def _averaged(self, y: Tensor) -> None:
        """The last iterate joins the mean; recent ones weigh more, and the mean never forgets more slowly than FORGET."""
        state = self._states["average"]
        n = int(state["n"]) + 1 if state else 1
        weight = max(min(1.0, 4.0 / (n + 3)), FORGET)
        mean = state["mean"] + weight * (y - state["mean"]) if state else y
        self._states["average"] = {"last": y, "mean": mean, "n": torch.tensor(n)}

    def _lower_loop(self, batches: list[Any], y: Tensor, averages: bool) -> _Loop:
        """T steps on g from the present y, each along the gradient of its own batch."""
        loop, before = _Loop(), y
        blind = getattr(self.lower_step, "blind", None)
        for batch in batches:
            here = self.oracle.lower(batch, y)
            square = dot(here.grad, here.grad)
            step = blind(-square, self.k, self._lower_memory) if blind is not None and isfinite(square) else None
            if not isfinite(square) or (step is None and not isfinite(here.value)):
                # the step before led here, or the batch is bad: back to where the loss was finite
                y = self._states["average"]["mean"] if self._states["average"] else before
                self._states["average"] = {}  # the last iterate is of no use: the next loop begins at the mean
                self._lower_memory = _shortened(self._lower_memory)
                loop.status = Status.NON_FINITE
                break
            loop.point, loop.last = here, square**0.5
            loop.first = loop.first or loop.last
            if averages and batch is batches[-1]:
                self._judge_mean(here, batch)
            if self.lower_tol is not None and square**0.5 <= self.lower_tol:
                break
            if step is None:
                step = self._lower_choose(here, batch, y, square)
            self._lower_memory = step.memory
            loop.checks += step.checks
            if step.status is not Status.OK:
                loop.status = worst(loop.status, step.status)
            loop.steps += 1
            before = y
            if step.size > 0:
                loop.beta = self._beta = step.size
            y = self._lower_point(y, here.grad, step.size)
            if (step.size * loop.last > FAR or not self.problem.y.alike) and not self.problem.y.holds(y):
                y, loop.status = before, Status.NON_FINITE
            if averages:
                self._averaged(y)
        self.problem.y.write_(self._states["average"]["mean"] if self._states["average"] else y)
        return loop

    def _behind(self, loop: _Loop) -> bool:
        """Whether the lower loop has done its steps and left too much of its gradient."""
        if loop.status in (Status.NON_FINITE, Status.ROUNDING) or loop.steps < self.lower_iters:
            return False
        return loop.last > BEHIND * loop.first

    def _polish(self, linear: LinearSolver, batch: Any) -> int:
        """One Newton step on g, if it lowers g: the lower loop has left y too far behind. Returns the checks made."""
        graph = self.oracle.lower_graph(batch, check=False)  # the one of the hypergradient is compared
        step = linear.solve(graph.hessian, graph.grad, {}).z
        before = self.problem.y.read()
        y = self._lower_point(before, step, 1.0)
        if not self.problem.y.holds(y):
            return 0
        self.problem.y.write_(y)
        if not self.oracle.lower_value(batch, graph.moment) < graph.value:
            self.problem.y.write_(before)
        return 1

    def _lower_choose(self, here: LowerPoint, batch: Any, y: Tensor, square: float) -> Step:
        def at(t: float) -> float:
            point = self._lower_point(y, here.grad, t)
            if not self.problem.y.holds(point):
                return float("inf")
            return self.oracle.lower_value(batch, here.moment, point)

        return self.lower_step.choose(Line(here.value, -square, at, eps=here.eps, clock=self.k), self._lower_memory)

    def _lower_point(self, y: Tensor, gradient: Tensor, t: float) -> Tensor:
        point = torch.add(y, gradient, alpha=-t) if t < FAR else y - t * gradient  # the first refuses what overflows
        bounds = self.problem.lower_bounds
        return point if bounds is None else bounds.project(point, self.problem.y)

    def _inside(self, heading: Heading, reach: float, x: Tensor) -> Heading:
        """The heading bent so that its ray stays inside the bounds of x."""
        bounds = self.problem.upper_bounds
        if bounds is None:
            return heading
        search = inside(bounds, x, heading.search, reach, self.problem.x)
        move = search if heading.move is heading.search else inside(bounds, x, heading.move, reach, self.problem.x)
        return replace(heading, search=search, move=move)

    def _reach(self, estimate: Hypergradient, search: Tensor) -> float:
        """How far a ray inside bounds is laid out: a little beyond the last step, at first the Polyak step."""
        if self._upper_memory.step:
            return 4.0 * self._upper_memory.step
        slope = abs(dot(estimate.flat, search))
        return abs(estimate.value) / slope if slope > 0 and estimate.value != 0 else 1.0

    def _arrive(self, scene: Scene, ray: Ray, heading: Heading, step: Step) -> tuple[float, State]:
        """Write x and y after the step; where it is too long for the response, or not finite, a shorter one or none."""
        taken, learnt = ray.settle(step.size) if step.size > 0 else (0.0, {})
        x, y = scene.x, scene.y
        if taken > 0:
            x = scene.x - taken * heading.move
            y = scene.y if ray.follow is None else ray.follow(taken)
            if self.problem.upper_bounds is not None:  # the rounding of x - t d may cross the bound
                x = self.problem.upper_bounds.project(x, self.problem.x)
            if self.problem.lower_bounds is not None:
                y = self.problem.lower_bounds.project(y, self.problem.y)
            if not (self.problem.x.holds(x) and self.problem.y.holds(y)):
                x, y, taken = scene.x, scene.y, 0.0
        self._write(x, y)
        average = self._states["average"]
        if average:  # the mean lies at the y that the response has moved, and the last iterate moves with it
            self._states["average"] = {
                **average,
                "mean": self.problem.y.read(),
                "last": average["last"] + (y - scene.y),
            }
        return taken, learnt

    def _go_back(self, record: Record) -> Record:
        """The present point is of no use: return to the last good one, and be more careful from there."""
        assert self._good is not None
        self._write(*self._good)
        self._states["average"] = {}
        self._upper_memory = _shortened(self._upper_memory)
        self._lower_memory = _shortened(self._lower_memory)
        return replace(record, upper_status=Status.NON_FINITE, status=Status.NON_FINITE)

    def _write(self, x: Tensor, y: Tensor) -> None:
        self.problem.x.write_(x)
        self.problem.y.write_(y)

    def _batches(self, lower_batches: Any) -> list[Any]:
        if not isinstance(lower_batches, list):
            return [lower_batches] * self.lower_iters
        if len(lower_batches) != self.lower_iters:
            raise ValueError(
                f"`{type(self).__name__}.step(lower_batches=[...])`: a list needs one batch for each of the "
                f"lower_iters = {self.lower_iters} lower steps, got {len(lower_batches)}; "
                "pass a tuple or a tensor for one batch for all"
            )
        return lower_batches

    def state_dict(self) -> dict[str, Any]:
        """All that the next iteration depends on beside the parameters: numbers and tensors, safe to load without code."""
        if not _plain(self._last_batch):
            logger.warning(
                "the last upper batch is a %s and can't be saved; the first step after loading is judged on its own batch",
                type(self._last_batch).__name__,
            )
        return {
            "k": self.k,
            "upper_memory": _packed(self._upper_memory),
            "lower_memory": _packed(self._lower_memory),
            "beta": self._beta,
            "states": {name: dict(state) for name, state in self._states.items()},
            "failures": self._failures,
            "last_batch": self._last_batch if _plain(self._last_batch) else None,
            "good": None if self._good is None else list(self._good),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken. The parameters themselves are the caller's to restore."""
        missing = sorted(
            {"k", "upper_memory", "lower_memory", "beta", "states", "failures", "last_batch", "good"} - set(state)
        )
        if missing:
            raise ValueError(
                f"`{type(self).__name__}.load_state_dict(...)`: not the state of a solver, it lacks {missing}"
            )
        good = state["good"]
        if good is not None and (len(good[0]), len(good[1])) != (self.problem.x.numel, self.problem.y.numel):
            raise ValueError(
                f"`{type(self).__name__}.load_state_dict(...)`: the state is of a problem with {len(good[0])} upper and "
                f"{len(good[1])} lower parameters, this one has {self.problem.x.numel} and {self.problem.y.numel}"
            )
        try:  # all is read before anything is changed
            upper, lower = _unpacked(state["upper_memory"]), _unpacked(state["lower_memory"])
            k, beta, failed = int(state["k"]), float(state["beta"]), int(state["failures"])
            states = {name: state["states"].get(name, {}) for name in _PARTS}
            copies: dict[str, State] = {
                name: {key: t.clone() for key, t in part.items()} for name, part in states.items()
            }
            point = None if good is None else (good[0].clone(), good[1].clone())
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"`{type(self).__name__}.load_state_dict(...)`: not the state of a solver ({error}); nothing was loaded"
            ) from error
        self.k, self._beta, self._failures, self._good = k, beta, failed, point
        self._upper_memory, self._lower_memory, self._states = upper, lower, copies
        self._last_batch, self._loaded = state["last_batch"], True

    def __repr__(self) -> str:
        parts = (
            "direction",
            "response",
            "hypergrad",
            "upper_step",
            "lower_step",
            "lower_iters",
            "lower_tol",
            "lower_average",
            "search_every",
            "polish",
        )
        return f"{type(self).__name__}({', '.join(f'{name}={getattr(self, name)!r}' for name in parts)})"


def _shortened(memory: Memory) -> Memory:
    return memory if memory.step is None else replace(memory, step=0.1 * memory.step)


def _packed(memory: Memory) -> dict[str, Any]:
    return {"k": memory.k, "step": memory.step, "extra": list(memory.extra)}


def _unpacked(state: Mapping[str, Any]) -> Memory:
    return Memory(int(state["k"]), state["step"], tuple(state["extra"]))


def _equal(one: Any, two: Any) -> bool:
    """Whether two plain batches hold the same numbers."""
    if isinstance(one, Tensor):
        return isinstance(two, Tensor) and one.dtype == two.dtype and torch.equal(one, two.to(one.device))
    if isinstance(one, Mapping):
        return isinstance(two, Mapping) and one.keys() == two.keys() and all(_equal(one[k], two[k]) for k in one)
    if isinstance(one, list | tuple):
        same = isinstance(two, list | tuple) and len(one) == len(two)
        return same and all(_equal(a, b) for a, b in zip(one, two, strict=True))
    return not isinstance(two, Tensor) and bool(one == two)


def _plain(batch: Any) -> bool:
    """Whether a batch is made of tensors, numbers and containers alone, so that it can be saved and read back safely."""
    if isinstance(batch, Mapping):
        return type(batch) is dict and all(isinstance(key, str) and _plain(value) for key, value in batch.items())
    if isinstance(batch, list | tuple):
        return type(batch) in (list, tuple) and all(_plain(entry) for entry in batch)
    return batch is None or isinstance(batch, Tensor | int | float | str | bool)
