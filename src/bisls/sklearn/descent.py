"""Newton's method above, for some groups: several upper problems in step with each other, each with its Hessian.

With few groups the Hessian of the held-out loss by the logarithms of the penalties costs a solve a group with a factor that is
there anyhow, and a minimum is found in two or three evaluations where L-BFGS needs ten.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy.linalg.lapack import dpotrf, dpotrs

from bisls.sklearn.lower import Array
from bisls.sklearn.tuning import Index

FAR = 3.0  # no logarithm of a penalty changes by more in a step
BLIND = 0.5  # the longest step that is taken without looking
SHORT, CUBIC = 0.75, 0.2  # after a step so short, about 0.2 length^2 of what it promised is left
LEFT = 0.1  # of `tol`: the most that may be left where nobody looks again
AGREE = 1e-4  # of the decrease that the quadratic model promises, for a step to be taken
ROUND = 1e-13  # of the value: what rounding may add to it
SMALLEST = 1e-10  # of the largest curvature: what is flatter is not followed further than that
ROUNDED = 1e-4  # of the largest pivot: with smaller ones there may be curvature that is nothing but rounding
SHRINK = 0.25  # what is left of a radius after a step that was refused

Evaluated = tuple[Array, Array, Array]  # values, gradients and Hessians, one for each problem


@dataclass
class Ended:
    """Where the problems ended: points, where they were looked at last, in which evaluation that was (0: the first), values
    (without a look: what was promised), iterations, and whether all ended."""

    x: Array
    at: Array
    looks: Index
    values: Array
    steps: int
    converged: bool


def descend(
    evaluate: Callable[[Array, Index], Evaluated],
    start: Array,
    room: tuple[Array, Array],
    units: Array,
    *,
    tol: float,
    max_iter: int,
    least: float = 1.0,
    first: Evaluated | None = None,
    ahead: bool = False,
) -> Ended:
    """Minimise several functions, each by Newton's method within a radius and a box.

    Args:
        evaluate: Values, gradients and Hessians at points, for the problems with these numbers.
        start: Where each problem begins, a row each.
        room: The bounds, below and above, the same for all.
        units: How far the logarithm of a penalty moves with each coordinate; steps are measured in it.
        tol: A problem ends where its next step promises less than this, of its value; the step is taken still, unseen if short.
        max_iter: Steps at most.
        least: What a smaller value counts as.
        first: What ``evaluate`` gives at the start, where that is known.
        ahead: A problem ends too where the step after the next one is expected to promise much less.
    """
    low, high = room
    x = np.clip(start, low, high)
    every = np.arange(len(x))
    values, slopes, bends = evaluate(x, every) if first is None else first
    ends = x.copy()
    radius = np.full(len(x), FAR)
    open_, looks = np.ones(len(x), dtype=bool), np.zeros(len(x), dtype=np.intp)
    steps = 0
    while steps < max_iter and open_.any():
        steps += 1
        step, sure = _steps(x, slopes, bends, low, high, radius[:, None] / units)
        trial = np.minimum(np.maximum(x + step, low), high)
        step = trial - x
        promised = -(slopes * step).sum(1) - 0.5 * (step * (bends @ step[:, :, None])[:, :, 0]).sum(1)
        little, length = tol * np.maximum(np.abs(values), least), np.abs(units * step).max(1, initial=0.0)
        last = promised <= little
        blind = open_ & last & (length <= BLIND)
        if ahead:
            blind |= open_ & sure & (length <= SHORT) & (CUBIC * length**2 * promised <= LEFT * little)
        ends[blind], values[blind] = trial[blind], values[blind] - promised[blind]
        open_ &= ~blind
        at = np.flatnonzero(open_)
        if not len(at):
            break
        seen, slope, bend = evaluate(trial[at], at)
        taken = seen <= values[at] - AGREE * promised[at] + ROUND * np.abs(values[at])
        good = at[taken]
        looks[good] = steps
        x[good] = ends[good] = trial[good]
        values[good], slopes[good], bends[good] = seen[taken], slope[taken], bend[taken]
        radius[at] = np.where(taken, FAR, SHRINK * length[at])
        open_[at] = ~(last[at] | (~taken & (radius[at] < 1e-12)))
    return Ended(ends, x, looks, values, steps, not open_.any())


def _steps(x: Array, g: Array, h: Array, low: Array, high: Array, radius: Array) -> tuple[Array, Array]:
    """Newton's steps, no longer than the radius, and whether curvature was positive; what a bound holds stays where it is."""
    held = ((x <= low) & (g > 0)) | ((x >= high) & (g < 0))
    if held.any():
        g = np.where(held, 0.0, g)
        h = np.where(held[:, :, None] | held[:, None, :], 0.0, h)
    step, sure = np.empty_like(g), np.ones(len(g), dtype=bool)
    for b, (slope, bend) in enumerate(zip(g, h, strict=True)):
        sure[b] = _newton(slope, bend, step[b])
    if not sure.all():
        step[~sure] = _modified(g[~sure], h[~sure])
        step[held] = 0.0
    longest = (np.abs(step) / radius).max(1, initial=1.0)
    return np.asarray(step / longest[:, None]), sure


def _newton(g: Array, h: Array, step: Array) -> bool:
    """Write the step where all curvature is positive, and none of it nearly nothing; whether it is."""
    factor, failed = dpotrf(h.T, lower=1, clean=0)
    if failed:
        return False
    pivots = factor.diagonal()
    if not pivots.min() > ROUNDED * pivots.max():
        return False
    np.negative(dpotrs(factor, g, lower=1)[0], out=step)
    return True


def _modified(g: Array, h: Array) -> Array:
    """The step with the curvature's absolute value."""
    size, vectors = np.linalg.eigh(h)
    size = np.abs(size)
    size = np.maximum(size, np.maximum(SMALLEST * size.max(1, keepdims=True), np.finfo(float).tiny))
    return np.asarray(-(vectors @ ((g[:, None, :] @ vectors)[:, 0] / size)[:, :, None])[:, :, 0])
