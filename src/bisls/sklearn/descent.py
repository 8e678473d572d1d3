"""Newton's method above, for some groups: several upper problems in step with each other, each with its Hessian.

With few groups the Hessian of the held-out loss by the logarithms of the penalties costs a solve a group with a factor that is
there anyhow, and a minimum is found in two or three evaluations where L-BFGS needs ten.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy.linalg.lapack import dsyev

from bisls.sklearn.lower import Array
from bisls.sklearn.tuning import Index

FAR = 3.0  # no logarithm of a penalty changes by more in a step
BLIND = 0.5  # the longest step that is taken without looking
AGREE = 1e-4  # of the decrease that the quadratic model promises, for a step to be taken
ROUND = 1e-13  # of the value: what rounding may add to it
SMALLEST = 1e-10  # of the largest curvature: what is flatter is not followed further than that
SHRINK = 0.25  # what is left of a radius after a step that was refused

Evaluated = tuple[Array, Array, Array]  # values, gradients and Hessians, one for each problem


@dataclass
class Ended:
    """Where the problems ended: points, values at them (None where they were not asked for), iterations, and whether all did."""

    x: Array
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
    unseen: bool = False,
) -> Ended:
    """Minimise several functions, each by Newton's method within a radius and a box.

    Args:
        evaluate: Values, gradients and Hessians at points, for the problems with these numbers.
        start: Where each problem begins, a row each.
        room: The bounds, below and above, the same for all.
        units: How far the logarithm of a penalty moves with each coordinate; steps are measured in it.
        tol: A problem ends where its next step promises less than this, of its value or of 1; the step is taken still.
        max_iter: Steps at most.
        unseen: Whether a short last step is taken without looking at what it leads to; values are those before it then.
    """
    low, high = room
    x = np.clip(start, low, high)
    every = np.arange(len(x))
    values, slopes, bends = evaluate(x, every)
    radius = np.full(len(x), FAR)
    open_, last, short = np.ones(len(x), dtype=bool), np.zeros(len(x), dtype=bool), np.zeros(len(x), dtype=bool)
    steps = 0
    while steps < max_iter and open_.any():
        steps += 1
        at = np.flatnonzero(open_)
        trial, promised = x.copy(), np.zeros(len(x))
        for b in at:
            step = _step(x[b], slopes[b], bends[b], low, high, radius[b] / units)
            trial[b] = np.clip(x[b] + step, low, high)
            step = trial[b] - x[b]
            promised[b] = -(slopes[b] @ step + 0.5 * step @ bends[b] @ step)
            little = promised[b] <= tol * max(abs(values[b]), 1.0)
            last[b], short[b] = little, np.abs(units * step).max(initial=0.0) <= BLIND
        if unseen:
            blind = open_ & last & short
            x[blind] = trial[blind]
            open_ &= ~blind
            at = np.flatnonzero(open_)
            if not len(at):
                break
        seen, slope, bend = evaluate(trial[at], at)
        for b, value, g, h in zip(at, seen, slope, bend, strict=True):
            slack = ROUND * abs(values[b])
            taken = value <= values[b] - AGREE * promised[b] + slack
            if taken:
                x[b], values[b], slopes[b], bends[b] = trial[b], value, g, h
                radius[b] = FAR
            else:
                radius[b] = SHRINK * np.abs(units * (trial[b] - x[b])).max()
            open_[b] = not (last[b] or (not taken and radius[b] < 1e-12))
    return Ended(x, values, steps, not open_.any())


def _step(x: Array, g: Array, h: Array, low: Array, high: Array, radius: Array) -> Array:
    """Newton's step where curvature is made positive, no longer than the radius; what a bound holds stays where it is."""
    free = ~(((x <= low) & (g > 0)) | ((x >= high) & (g < 0)))
    step = np.zeros_like(x)
    if not free.any():
        return step
    size, vectors, _ = dsyev(h[np.ix_(free, free)])
    size = np.abs(size)
    size = np.maximum(size, max(SMALLEST * float(size.max()), np.finfo(float).tiny))
    step[free] = -vectors @ ((g[free] @ vectors) / size)
    longest = float((np.abs(step) / radius).max())
    return step / longest if longest > 1.0 else step
