"""Two views of one problem, and which one a solver takes: implicit, where y is solved for; T-step, where it is trained."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from bisls.batches import Sample
from bisls.hypergrad.base import HypergradientMethod
from bisls.linear.cg import CG
from bisls.lower import LowerPart
from bisls.oracle import Oracle
from bisls.paced import Paced
from bisls.parts import identity
from bisls.states import Fields, Whole
from bisls.status import Status
from bisls.upper import Upper

LOOK = CG(tol=1e-2, iters=10)  # whether there is negative curvature where the run begins
SOLVED, TRAINED, SHARED = (
    0,
    1,
    2,
)  # the views: y is solved for; a network is trained; x is a part of the model that both see
BENT = 3  # so many linear solves in a row that met negative curvature: y is trained, not solved for


@dataclass(frozen=True)
class View:
    """One way to look at a problem: what trains y, a gradient, and the upper step that belongs to it.

    Attributes:
        lower: Trains y.
        hypergrad: Estimates the hypergradient.
        upper: The upper step.
    """

    lower: LowerPart
    hypergrad: HypergradientMethod
    upper: Upper | Paced

    @property
    def name(self) -> str:
        """What a record says: "implicit" or "t-step"."""
        return self.hypergrad.view

    @property
    def identity(self) -> str:
        """What tells it from another: its parts and their settings."""
        made = {"upper": self.upper, "lower": self.lower, "hypergrad": self.hypergrad}
        return ", ".join(f"{name}={identity(own)}" for name, own in made.items())


@dataclass(frozen=True)
class Choice:
    """Which view is taken, and what speaks for it.

    Attributes:
        chosen: The number of the view; -1 before anybody has looked.
        bent: How many linear solves in a row have met negative curvature.
    """

    KIND: ClassVar[Fields] = Fields({"chosen": Whole(-1, SHARED), "bent": Whole()})

    chosen: int = -1
    bent: int = 0

    def begun(self, oracle: Oracle, sample: Sample) -> Choice:
        """Before the first iteration, from the lower curvature at the start and from what f depends on.

        A few steps of conjugate gradients meet negative curvature: a network, which is trained. Where f depends on x itself, and
        the lower data are batches, x is a part of the model that both levels see (a representation): the inverse Hessian of a
        batch adds more noise than it tells. Otherwise y is solved for.
        """
        with oracle.problem.probing():
            graph = oracle.lower_graph(sample.lower.newest)
            met = LOOK.solve(graph.hessian, graph.grad, {}).status
            if met is Status.NEGATIVE_CURVATURE:
                return Choice(TRAINED)
            direct = sample.lower.several and bool(oracle.upper(sample.upper).grad_x.any())
        return Choice(SHARED if direct else SOLVED)

    def seen(self, linear: Status) -> Choice:
        """After an iteration, with how its linear solves ended."""
        if self.chosen != SOLVED:
            return self
        bent = self.bent + 1 if linear in (Status.NEGATIVE_CURVATURE, Status.DAMPED) else 0
        return Choice(TRAINED if bent >= BENT else SOLVED, bent)

    def packed(self) -> dict[str, Any]:
        """Plain numbers, for a checkpoint."""
        return asdict(self)

    @classmethod
    def unpacked(cls, state: Mapping[str, Any]) -> Choice:
        """What `packed` gave."""
        return cls(**state)


def chosen_in(state: Any, views: int) -> int:
    """The number of the view in a state that somebody loads; -1 where it has none that there is."""
    choice = state.get("choice") if isinstance(state, Mapping) else None
    chosen = choice.get("chosen") if isinstance(choice, Mapping) else None
    return chosen if isinstance(chosen, int) and 0 <= chosen < views else -1
