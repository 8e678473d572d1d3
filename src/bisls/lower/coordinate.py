"""The lower problem with an L1 term, solved by coordinate descent on quadratic models, as glmnet does."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import isfinite
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from bisls._check import number, settle, whole_number
from bisls.batches import Minibatches
from bisls.derivatives import Following
from bisls.lower.base import SEEN, Lowered, LowerPart, State
from bisls.operators import block_rows
from bisls.oracle import LowerPoint, Oracle
from bisls.signs import Array, Solve, by_coordinates, by_signs
from bisls.states import Fields, Maybe, Numbers
from bisls.status import Status
from bisls.still import Moment
from bisls.vector import Vector, dot, finite, norm

SWEEPS = 20  # of coordinate descent, which show most of the signs, before these are looked at one by one
MOST = 5000  # coordinates that are not zero: so many rows of second derivatives are kept at most
CHANGED = 0.1  # a model whose gradient is wrong by more than this share of its change is made anew
STALLED = 3  # so many turns in a row that bring the end no nearer, and rounding is all that is left
SHORTEST = 1e-6  # of the step to the minimum of a model


@dataclass(frozen=True)
class CoordinateDescent(LowerPart):
    """Solves a lower problem with an L1 term (``Bilevel(lower_l1=...)``) on one batch, exact zeros and all.

    In each turn the smooth part of g is replaced by its quadratic model, of the coordinates that are not zero or have a gradient
    larger than their weight; coordinate descent finds most of the signs of its minimum, systems of equations the rest. For
    a quadratic g one model does for good; for others it is proximal Newton, searched on g. The second derivatives of one
    iteration serve in the next for as long as they predict how gradients change.

    At the solution coordinates that are zero do not respond to x, so that `Implicit` solves with the others alone, and its
    hypergradient is exact wherever signs do not change. There are no steps to look through: not for `Lookahead` or `Unrolled`.

    Args:
        iters: Turns at most, at least 1; a quadratic needs about three. Where they do not do, the status is ``MAX_ITERS``.
        tol: How far a gradient may be from what a solution has, as a share of the largest gradient or weight where it began; at
            least 0, and no smaller than the precision allows.

    Examples:
        >>> import torch, bisls
        >>> log = torch.tensor([-3.0], requires_grad=True)
        >>> y = torch.zeros(3, requires_grad=True)
        >>> problem = bisls.Bilevel(
        ...     upper_loss=lambda _: ((y - torch.tensor([1.0, 0.5, 0.0])) ** 2).sum(),
        ...     lower_loss=lambda _: 0.5 * ((y - torch.tensor([2.0, 1.5, 0.2])) ** 2).sum(),
        ...     upper_params=[log],
        ...     lower_params=[y],
        ...     lower_l1=lambda: log.exp(),  # one weight for all coordinates
        ... )
        >>> solver = bisls.BiSLS(problem)  # takes CoordinateDescent() for this problem
        >>> for _ in range(20):
        ...     record = solver.step(None, None)
        >>> round(log.exp().item(), 3), [round(own, 3) for own in y.tolist()]
        (1.0, [1.0, 0.5, 0.0])
    """

    iters: int = 100
    tol: float = 1e-10

    solves_kinks: ClassVar[bool] = True

    def __post_init__(self) -> None:
        settle(self, iters=whole_number(1), tol=number("[0, inf)"))

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
        """Solve on the batch. There is no trace: the end does not depend on the way."""
        if batches.several:
            raise ValueError(
                f"`CoordinateDescent()`: it solves the lower problem on one batch, and was given {len(batches)} different ones "
                "for an iteration; pass all lower data as one batch, or fewer rows as one"
            )
        with torch.no_grad():
            weights = oracle.problem.l1_weights()
        if bool((weights < 0).any()):
            raise ValueError(
                f"`Bilevel(lower_l1=...)`: weights must be at least 0, and one is {weights.min().item():.3g}; return the "
                "exponential of an upper parameter, or keep it above 0 by upper_bounds"
            )
        return self._solve(oracle, batches.newest, y, weights, state, replay)

    def rerun(self, oracle: Oracle, batches: Minibatches, lowered: Lowered) -> Tensor | None:
        """Where the problem is solved at the present x, from where it was solved last: the end does not depend on the way.

        None also where nothing with a weight is left, and something is now: x would have no influence from there on, and F is
        as low just before.
        """
        weights = oracle.problem.l1_weights()
        if not bool((weights >= 0).all()):
            return None
        with oracle.problem.probing(lowered.beginning.moment):
            again = self._solve(oracle, batches.newest, lowered.y, weights, lowered.state, None)
        dead = bool((lowered.y[weights > 0] != 0).any()) and not bool((again.y[weights > 0] != 0).any())
        return None if dead or again.status in (Status.NON_FINITE, Status.NEGATIVE_CURVATURE) else again.y

    def keeps(self, y: Vector | None) -> Fields:
        """The second derivatives, where they are all there."""
        if y is None:
            return Fields(empty=True)
        n = y.numel
        return Fields({"hessian": Maybe(Numbers((n, n), (y.dtype,), device=y.device))}, empty=True)

    def _solve(
        self, oracle: Oracle, batch: Any, y: Tensor, weights: Tensor, state: State, replay: Moment | None
    ) -> Lowered:
        model = Model(oracle, batch, replay, state.get("hessian"))
        with oracle.upper_frozen():
            first = here = Place.at(oracle, batch, y, weights, replay)
        if first.point.moment.passed:
            raise ValueError(
                "`CoordinateDescent()`: lower_loss draws random numbers (dropout, noise), and what is solved for must be the "
                "same whenever it is looked at; leave them out of it"
            )
        goal = max(self.tol, SEEN / 10 * here.point.eps) * max(_largest(here.smooth), _largest(weights))
        best, stalled, steps, checks, status = here, 0, 0, 0, Status.OK
        for turn in range(self.iters + 1):
            if not here.finite:
                status = Status.NON_FINITE
                break
            best, stalled = (here, 0) if here.size < best.size or turn == 0 else (best, stalled + 1)
            if here.size <= goal or stalled >= STALLED:
                break
            if turn == self.iters:
                status = Status.MAX_ITERS
                break
            made = self._turn(oracle, batch, here, model, replay)
            if made is None:
                status = Status.NEGATIVE_CURVATURE
                break
            here, looks = made
            steps, checks = steps + 1, checks + looks - 1
        end = first if status is Status.NON_FINITE else best
        oracle.problem.y.write_(end.y)
        size = float(steps > 0)
        return Lowered(
            y=end.y,
            step=size,
            steps=steps,
            checks=checks,
            status=status,
            state={"hessian": model.whole},
            accepted=size,
            first=first.point.without_gradient() if isfinite(first.point.value) else None,
            left=end.size,
            promised=0.0,
        )

    def _turn(
        self, oracle: Oracle, batch: Any, here: Place, model: Model, replay: Moment | None
    ) -> tuple[Place, int] | None:
        """To the minimum of the model, or not quite; how often g was looked at. None: there is no minimum."""
        at = here.open
        stale = model.known
        gram = model.block(here.y, at)
        old, weights = here.y[at].double().cpu().numpy(), here.weights[at].double().cpu().numpy()
        wanted = _minimised(gram, gram @ old - here.smooth[at].double().cpu().numpy(), weights, old)
        if wanted is None:
            if not stale:
                return None
            model.forget()
            return self._turn(oracle, batch, here, model, replay)
        target = here.y.clone()
        target[at] = torch.from_numpy(wanted).to(target)
        d, t, looks = target - here.y, 1.0, 0
        promised = -dot(here.smooth, d) - dot(here.weights, target.abs() - here.y.abs())
        slack = SEEN * here.point.eps * abs(here.point.value)
        there = here
        while t > SHORTEST:
            with oracle.upper_frozen():
                there = Place.at(oracle, batch, target if t == 1.0 else here.y + t * d, here.weights, replay)
            looks += 1
            if there.finite and there.point.value <= here.point.value - 1e-4 * t * promised + slack:
                break
            t /= 4
        else:
            there = here
        turned, expected = there.smooth - here.smooth, torch.from_numpy(gram @ (wanted - old)).to(d)
        if t < 1.0 or norm(turned[at] - expected) > CHANGED * norm(expected):
            model.forget()
        return there, looks


@dataclass(frozen=True)
class Place:
    """Where y is: g there, its gradient without the L1 term, how far it is from a solution, and which coordinates are open.

    Attributes:
        size: The largest entry of the gradient, of what is zero the part beyond its weight.
        open: The coordinates that are not zero, will not stay so, or have no weight.
    """

    y: Tensor
    weights: Tensor
    point: LowerPoint
    smooth: Tensor
    size: float
    open: Tensor

    @staticmethod
    def at(oracle: Oracle, batch: Any, y: Tensor, weights: Tensor, replay: Moment | None) -> Place:
        """At y; x is no part of the graph."""
        point = oracle.lower(batch, y, replay)
        smooth = point.grad - weights * y.sign()
        left = torch.where(y == 0, (smooth.abs() - weights).clamp(min=0.0), point.grad)
        open_ = torch.nonzero((y != 0) | (left != 0) | (weights == 0))[:, 0]
        return Place(y, weights, point, smooth, _largest(left), open_)

    @property
    def finite(self) -> bool:
        """Whether the loss and its gradient are."""
        return isfinite(self.point.value) and finite(self.smooth)


@dataclass
class Model:
    """Second derivatives of g, at some point: of all coordinates where they can be written out, else of those asked for."""

    oracle: Oracle
    batch: Any
    replay: Moment | None
    whole: Tensor | None
    rows: dict[int, Tensor] = field(default_factory=dict)

    @property
    def known(self) -> bool:
        """Whether there are any, of a point before."""
        return self.whole is not None or bool(self.rows)

    def block(self, y: Tensor, at: Tensor) -> Array:
        """Those of some coordinates; computed at y where they are not known."""
        if len(at) > MOST:
            raise ValueError(
                f"`CoordinateDescent()`: {len(at):,} coordinates are not zero, and second derivatives of at most {MOST:,} are "
                "kept; begin with larger weights, or write y = u - v with u, v in a Box(low=0.0), the L1 term as u + v"
            )
        if block_rows(len(y)) == len(y):
            if self.whole is None:
                found = self._graph(y).unheld.hessian.matrix()
                assert found is not None
                self.whole = (found + found.T) / 2
            own = self.whole[at[:, None], at]
        else:
            missing = [j for j in at.tolist() if j not in self.rows]
            if missing:
                hessian = self._graph(y).unheld.hessian
                for j in missing:
                    unit = torch.zeros_like(y)
                    unit[j] = 1.0
                    self.rows[j] = hessian(unit)
            own = torch.stack([self.rows[j] for j in at.tolist()])[:, at] if len(at) else y.new_zeros(0, 0)
            own = (own + own.T) / 2
        return np.asarray(own.double().cpu().numpy(), dtype=np.float64)

    def forget(self) -> None:
        """What is known is not believed any more."""
        self.whole, self.rows = None, {}

    def _graph(self, y: Tensor) -> Any:
        self.oracle.problem.y.write_(y)
        with torch.enable_grad():
            return self.oracle.lower_graph(self.batch, self.replay)


def _largest(flat: Tensor) -> float:
    return flat.abs().max().item()


def _minimised(gram: Array, right: Array, l1: Array, start: Array) -> Array | None:
    """The minimum of the model; None where it has none, or one that cannot be told from others."""
    l2, w = np.zeros_like(l1), start.copy()
    if np.any(start == 0):
        if not np.all(gram.diagonal() > 0):
            return None
        by_coordinates(gram, right, l1, l2, w, SWEEPS)
    for _ in range(2):
        if not np.all(np.isfinite(w)):
            return None
        found = by_signs(gram, right, l1, l2, w, _factorised)
        if found is not None:
            return found[0]
        if not np.all(gram.diagonal() > 0):
            return None
        by_coordinates(gram, right, l1, l2, w)  # columns that are alike: it gets there, if slowly
    return w if np.all(np.isfinite(w)) else None


def _factorised(gram: Array, l2: Array, active: Any) -> Solve:
    block = gram[np.ix_(active, active)]
    pivots = np.linalg.cholesky(block).diagonal()
    if not pivots.min() ** 2 > 1e-13 * pivots.max() ** 2:
        raise np.linalg.LinAlgError("singular but for rounding")

    def solve(v: Array) -> Array:
        return np.asarray(np.linalg.solve(block, v), dtype=np.float64)

    return solve
