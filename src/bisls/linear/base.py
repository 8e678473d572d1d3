"""What a linear solver takes and gives back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from bisls.record import Status

Operator = Callable[[Tensor], Tensor]
State = Mapping[str, Tensor]


@dataclass(frozen=True)
class Solution:
    """An approximate solution of H z = b.

    Attributes:
        z: The solution.
        residual: ||b - H z|| / ||b|| of this very z (0 where b is zero, NaN where the solver does not know it).
        status: How the solve ended.
        state: What the next, similar solve may start from (tensors, so that it can be saved).
    """

    z: Tensor
    residual: float
    status: Status
    state: State = field(default_factory=dict)


class LinearSolver(Protocol):
    """Solves H z = b with a symmetric H known by its products."""

    def solve(self, hessian: Operator, b: Tensor, state: State) -> Solution:
        """Solve H z = b; ``state`` is that of an earlier solution, or empty."""
        ...
