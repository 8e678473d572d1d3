"""What a linear solver takes and gives back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from bisls.operators import Operator as Operator
from bisls.states import FREE, Fields
from bisls.status import Status
from bisls.vector import Vector

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


class LinearSolver(ABC):
    """Solves H z = b with a symmetric H known by its products."""

    @abstractmethod
    def solve(self, hessian: Operator, b: Tensor, state: State) -> Solution:
        """Solve H z = b; ``state`` is that of an earlier solution, or empty. A plain function v -> H v will do for H."""

    def keeps(self, vector: Vector | None) -> Fields:
        """What its state may be where z is like these parameters, for one that is loaded; anything, where it does not say."""
        return FREE
