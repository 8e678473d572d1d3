"""The minimum of a quadratic with weighted absolute values, the lower problem of the lasso: by signs, and by coordinates.

``1/2 w'Gw - w'q + sum_j l1_j |w_j| + 1/2 sum_j l2_j w_j^2`` with G symmetric, by NumPy alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Solve = Callable[[Array], Array]
SWEEPS = 2000  # of coordinate descent at most
CHANGES = 100  # of signs and zeros, and twice as many as there are columns, before coordinate descent is asked


def by_signs(
    gram: Array, right: Array, l1: Array, l2: Array, start: Array, factorised: Callable[[Array, Array, Any], Solve]
) -> tuple[Array, Solve | None] | None:
    """The solution by its signs and zeros: solved with those of the start, which change one at a time until all are right.

    Args:
        gram: G.
        right: q.
        l1: The weights of the absolute values, at least 0; a coordinate of weight 0 is never held at zero.
        l2: What is added on the diagonal.
        start: Where to begin.
        factorised: (G, l2, some coordinates) -> what solves with their block; LinAlgError where it is not positive definite.

    Returns:
        The solution, and what solves with the block of the coordinates that are not zero (None: all are); None where a block
        is not positive definite, or signs go round in circles.
    """
    w, sign, slack = start.copy(), np.sign(start), 1e-12 * float(np.abs(right).max(initial=0.0))
    sign[(l1 == 0) & (sign == 0)] = 1.0  # of no penalty: always there, of any sign
    for _ in range(CHANGES + 2 * len(w)):
        active, back = np.flatnonzero(sign), None
        wanted = np.zeros_like(w)
        if len(active):
            try:
                back = factorised(gram, l2, active)
            except np.linalg.LinAlgError:
                return None
            wanted[active] = back((right - l1 * sign)[active])
        crossed = active[(wanted[active] * sign[active] < 0) & (l1[active] > 0)]
        if len(crossed):  # as far as the first that would change its sign: it is zero there
            shares = w[crossed] / (w[crossed] - wanted[crossed])
            first = int(np.argmin(shares))
            w = w + max(float(shares[first]), 0.0) * (wanted - w)
            w[crossed[first]] = sign[crossed[first]] = 0.0
            continue
        w = wanted
        left = right - gram @ w
        excess = np.where(sign == 0, np.abs(left) - l1 * (1 + 1e-9), 0.0)
        most = int(np.argmax(excess))
        if not excess[most] > slack:
            return w, back
        sign[most] = np.sign(left[most])
    return None


def by_coordinates(gram: Array, right: Array, l1: Array, l2: Array, w: Array, sweeps: int = SWEEPS) -> None:
    """Coordinate descent, in place, until a sweep changes little; the arguments are those of `by_signs`."""
    residual = right - gram @ w
    for _ in range(sweeps):
        change = 0.0
        for j in np.flatnonzero((w != 0) | (np.abs(residual) > l1)):
            own = gram[j, j]
            toward = residual[j] + own * w[j]
            new = np.sign(toward) * max(abs(toward) - l1[j], 0.0) / (own + l2[j])
            if new != w[j]:
                residual -= gram[:, j] * (new - w[j])
                change, w[j] = max(change, abs(new - w[j])), new
        if change <= 1e-10 * float(np.abs(w).max(initial=0.0)):
            return
