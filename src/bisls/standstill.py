"""Standstill: whether a run without noise has come to where nothing changes, or where nothing can be seen to change."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf, isfinite
from typing import Any

import torch
from torch import Tensor

from bisls.record import Record
from bisls.states import Each, Fields, Maybe, Number, Whole, flat, read
from bisls.status import Status
from bisls.vector import norm

STILL = 10  # iterations in a row in which nothing moves
UNSEEN = 30  # iterations in which the search saw nothing and f did not fall
ROUNDING = 4.0  # a change of so many units in the last place (of float32 where parameters are coarser) is rounding
NEAR = 64.0  # f wavers about its lowest value by so many of them
GROWTH = 1.5  # a step that has grown by more is still looking for its length
FALLS = 0.9  # gradients whose peak falls to less of it in half of such iterations show progress
WAVER = 2.0  # what moves to and fro ends within so many of its longest step
_DECIDED = (Status.OK, Status.STATIONARY, Status.ROUNDING, Status.NO_INFLUENCE)


class Standstill:
    """Whether nothing can be gained any more, in one of two ways.

    *Nothing moves* (`Fixed`): f, x and y are what they were ten iterations ago. *Nothing is seen* (`Hidden`): the rounding of f
    hides what is left, so x goes to and fro about the solution.

    Args:
        problem: The `Bilevel`.
        tol: What counts as no move beside rounding, at least 0: relative, for f and for the largest entry of x and of y.
    """

    def __init__(self, problem: Any, tol: float):
        self.problem = problem
        self.tol = tol
        self._fixed, self._hidden = Fixed(tol), Hidden()

    @property
    def reason(self) -> str:
        """Why the run is to stop; empty where it is not."""
        if self._fixed.count >= STILL:
            within = f"by more than {self.tol:g} of it" if self.tol else "beyond rounding"
            return f"no change of f, x and y {within} in {STILL} iterations (tol={self.tol:g})"
        if self._hidden.count >= UNSEEN:
            return f"f has not fallen in {UNSEEN} iterations whose gain its rounding hides (tol={self.tol:g})"
        return ""

    def look(self, record: Record) -> None:
        """Note an iteration; the parameters are where it left them."""
        x, y = self.problem.x, self.problem.y
        eps = torch.finfo(x.dtype).eps
        point: list[Tensor] = []

        def read() -> list[Tensor]:  # a copy of the parameters is made only where one is needed
            if not point:
                point.extend((x.read(), y.read()))
            return point

        self._fixed.look(record, eps, read)
        self._hidden.look(record, eps, read)

    def state_dict(self) -> dict[str, Any]:
        """The counts and what is compared with, for a checkpoint."""
        return {"fixed": dict(vars(self._fixed)), "hidden": dict(vars(self._hidden))}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken.

        Raises:
            ValueError: It is no such state; nothing was loaded.
        """
        own = read("`Standstill.load_state_dict(...)`", self.keeps(), state)
        for row, saved in ((self._fixed, own["fixed"]), (self._hidden, own["hidden"])):
            vars(row).update({name: saved[name] for name in vars(row) if name != "tol"})

    def keeps(self) -> Fields:
        """What a state may be."""
        points = Maybe(Each([flat(self.problem.x), flat(self.problem.y)]))
        pair = Each([Number(0.0, infinite=True)] * 2)
        fixed = {"tol": Number(0.0), "count": Whole(), "values": Maybe(Each([Number()] * 3)), "points": points}
        hidden = {"count": Whole(), "lowest": Number(infinite=True), "first": points, "last": points}
        return Fields({"fixed": Fields(fixed), "hidden": Fields({**hidden, "peaks": pair, "longest": pair})})


class Fixed:
    """Counts the iterations in a row in which neither f nor x nor y moved from where they were at the first of them.

    They are compared with the start of the row rather than with the iteration before, so that slow progress adds up and ends
    the row. An iteration says nothing, and ends the row as well, where a level failed or had no direction to descend in (its
    memory may still turn), where it took no step although its gradient asked for one (a schedule may be at zero), or where a
    step is still growing.

    Args:
        tol: As for `Standstill`.
    """

    def __init__(self, tol: float):
        self.tol = tol
        self.count = 0
        self.values: list[float] | None = None  # f, alpha and beta at the start of the row
        self.points: list[Tensor] | None = None  # x and y there, once f stands still

    def look(self, record: Record, eps: float, read: Any) -> None:
        """Note an iteration."""
        values = [record.upper_value, record.alpha, record.beta]
        if not (_settled(record) and isfinite(record.upper_value)):
            self._begin(None, None)
        elif self.values is None or self._changed(values, eps):
            self._begin(values, None)
        elif self.points is None:
            self._begin(self.values, read())
        elif any(self._moved(now, then) for now, then in zip(read(), self.points, strict=True)):
            self._begin(values, read())
        else:
            self.count += 1

    def _begin(self, values: list[float] | None, points: list[Tensor] | None) -> None:
        self.count, self.values, self.points = 0, values, points

    def _changed(self, values: list[float], eps: float) -> bool:
        assert self.values is not None
        (f, *steps), (first, *begun) = values, self.values
        allowed = max(ROUNDING * eps, self.tol) * max(abs(f), abs(first))
        grows = any(now > GROWTH * then for now, then in zip(steps, begun, strict=True))
        return abs(f - first) > allowed or (grows and not self.tol)  # a tol is taken at its word

    def _moved(self, now: Tensor, then: Tensor) -> bool:
        size = torch.maximum(now.abs(), then.abs())
        allowed = ROUNDING * torch.finfo(now.dtype).eps * size  # of each entry: they may be of very different sizes
        if self.tol:
            allowed = allowed.clamp_min(self.tol * float(size.max()))
        return bool(((now - then).abs() > allowed).any())


class Hidden:
    """Counts the iterations in which the upper search saw nothing (`Status.ROUNDING`) since f fell for the last time.

    A solution is known from the values of f only up to the root of their rounding; within that, steps go to and fro, and the
    count goes on. There is progress that f cannot show: steps that add up to a way, at either level, begin the count anew, and
    so do hypergradients whose peaks fall, as those of a swing that dies down do. Rules that do not search never say that they
    saw nothing, so they are never counted.
    """

    def __init__(self) -> None:
        self.count = 0
        self.lowest = inf  # f, in this row
        self.first: list[Tensor] | None = None  # x and y at the start of the row
        self.last: list[Tensor] | None = None  # in the iteration before
        self.peaks = [0.0, 0.0]  # the largest hypergradient in the first half of the row, and in the second
        self.longest = [0.0, 0.0]  # the longest way of x and of y in one iteration of the row

    def look(self, record: Record, eps: float, read: Any) -> None:
        """Note an iteration."""
        f, unit = record.upper_value, eps * abs(record.upper_value)
        failed = record.status.failed and record.status is not Status.NO_INFLUENCE
        if failed or not isfinite(f) or f < self.lowest - unit or f > self.lowest + NEAR * unit:
            self._begin(inf if failed or not isfinite(f) else f)
            return
        self.lowest = min(self.lowest, f)
        if record.upper_status not in (Status.ROUNDING, Status.STATIONARY) and self.first is None:
            return
        now = read()
        if self.first is None or self.last is None:
            self.first = self.last = now
            return
        ways = [norm(one - two) for one, two in zip(now, self.last, strict=True)]
        self.longest = [max(pair) for pair in zip(ways, self.longest, strict=True)]
        self.last = now
        half = int(self.count >= UNSEEN // 2)
        self.peaks[half] = max(self.peaks[half], record.hypergrad_norm)
        self.count += record.upper_status in (Status.ROUNDING, Status.STATIONARY)
        if self.count >= UNSEEN:
            ways = [norm(one - two) for one, two in zip(now, self.first, strict=True)]
            if any(way > WAVER * longest for way, longest in zip(ways, self.longest, strict=True)):
                self._begin(self.lowest)
            elif self.peaks[1] < FALLS * self.peaks[0]:
                self.count, self.peaks = UNSEEN // 2, [self.peaks[1], 0.0]

    def _begin(self, lowest: float) -> None:
        self.count, self.lowest, self.first, self.last = 0, lowest, None, None
        self.peaks, self.longest = [0.0, 0.0], [0.0, 0.0]


def _settled(record: Record) -> bool:
    """Whether an iteration without a change says that there is nothing to change."""
    levels = (
        (record.upper_status, record.alpha, record.hypergrad_norm),
        (record.lower_status, record.beta, record.lower_grad_norm if record.lower_steps else 0.0),
    )
    return not record.linear_status.failed and all(
        status in _DECIDED and (step > 0 or gradient == 0 or status is not Status.OK)
        for status, step, gradient in levels
    )
