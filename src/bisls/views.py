"""Two views of one problem, and which one a solver takes: implicit, where y is solved for; T-step, where it is trained."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from bisls.batches import Sample, fingerprint
from bisls.hypergrad.base import Hypergradient, HypergradientMethod
from bisls.linear.cg import CG
from bisls.lower import LowerPart
from bisls.oracle import Oracle
from bisls.paced import Paced
from bisls.parts import identity
from bisls.ranks import on_any_rank
from bisls.smooth import Smooth
from bisls.states import Fields, Whole
from bisls.status import Status
from bisls.upper import Upper
from bisls.vector import dot, norm

LOOK = CG(tol=1e-2, iters=10)  # whether there is negative curvature where the run begins
SOLVED, TRAINED, SHARED = (
    0,
    1,
    2,
)  # the views: y is solved for; a network is trained; x is a part of the model that both see
# where y begins anew: what lowers g lowers f or does not matter to it; or raises it, as in a minimax problem
AGREED, OPPOSED = 0, 1
AGAINST = -0.5  # the cosine of their gradients from which on they are opposed: noise about 0 is not
BENT = 3  # what was measured so many times in a row decides
DIRECT = 0.2  # a part of h that does not go through y is large from so much of the other part on


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
    upper: Upper | Paced | Smooth

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
        shared: How many hypergradients in a row had a large part that does not go through y.
        first: What tells the first lower batch from another, until the second has been seen; 0 where that says nothing.
        settled: 1 where nothing more is asked.
    """

    KIND: ClassVar[Fields] = Fields(
        {name: Whole(-1 if name == "chosen" else 0) for name in ("chosen", "bent", "shared", "first", "settled")}
    )

    chosen: int = -1
    bent: int = 0
    shared: int = 0
    first: int = 0
    settled: int = 0

    @property
    def open(self) -> bool:
        """Whether there is something to look at before the next iteration."""
        return self.chosen < 0 or self.first > 0

    def before(self, oracle: Oracle, sample: Sample) -> Choice:
        """What to take in the next iteration, where that is open."""
        return self._begun(oracle, sample) if self.chosen < 0 else self._again(sample)

    def _begun(self, oracle: Oracle, sample: Sample) -> Choice:
        """Before the first iteration: where a few steps of conjugate gradients meet negative curvature, y is a network.

        Where y begins anew, whether its steps serve f or an opponent (`AGREED`, `OPPOSED`).
        """
        if oracle.problem.lower_start is not None:
            return Choice(OPPOSED if _against(oracle, sample) else AGREED, settled=1)
        with oracle.problem.probing():
            graph = oracle.lower_graph(sample.lower.newest)
            met = LOOK.solve(graph.hessian, graph.grad, {}).status
        if met is not Status.NEGATIVE_CURVATURE:
            return Choice(SOLVED)
        return Choice(TRAINED, first=0 if sample.lower.several else fingerprint(sample.lower.newest))

    def _again(self, sample: Sample) -> Choice:
        """Before the next iteration: where the lower data are one batch for ever, even a network can be solved for, nearly."""
        if self.first == 0 or sample.lower.several:
            return self
        alike = fingerprint(sample.lower.newest) == self.first
        return Choice(SOLVED, settled=1) if not on_any_rank(not alike)[0] else Choice(TRAINED)

    def seen(self, estimate: Hypergradient, linear: Status, sample: Sample) -> Choice:
        """After an iteration.

        Args:
            estimate: Its hypergradient. Where f depends on x itself, and by much, x is a part of the model that both levels
                see (a representation); with batches the inverse Hessian of one adds more noise than it tells. Where that part
                and the rest of h only balance each other (a penalty on x, at its optimum) it says nothing.
            linear: How its linear solves ended.
            sample: Its batches.
        """
        if self.chosen != SOLVED or self.settled:
            return self
        bent = self.bent + 1 if linear in (Status.NEGATIVE_CURVATURE, Status.DAMPED) else 0
        several = sample.lower.several
        if bent >= BENT and sample.lower.steady:  # one batch for ever: what was learnt of it is kept
            return Choice(SOLVED, settled=1)
        if bent >= BENT:
            return Choice(TRAINED, first=0 if several else fingerprint(sample.lower.newest))
        shared = self.shared + 1 if several and _is_shared(estimate) else 0
        return Choice(SHARED if shared >= BENT else SOLVED, bent, shared)

    def packed(self) -> dict[str, Any]:
        """Plain numbers, for a checkpoint."""
        return asdict(self)

    @classmethod
    def unpacked(cls, state: Mapping[str, Any]) -> Choice:
        """What `packed` gave."""
        return cls(**state)


def _against(oracle: Oracle, sample: Sample) -> bool:
    problem, batch = oracle.problem, sample.lower.newest
    with problem.probing(), problem.y.lent(oracle.start(batch).y):
        f, g = oracle.upper(sample.upper).grad_y, oracle.lower(batch).grad
        return dot(f, g) < AGAINST * norm(f) * norm(g)


def _is_shared(estimate: Hypergradient) -> bool:
    if estimate.upper is None:
        return False
    direct = estimate.upper.grad_x
    through = estimate.flat - direct
    sizes = norm(direct), norm(through)
    return sizes[0] > DIRECT * sizes[1] > 0.0 and dot(direct, through) > -0.5 * sizes[0] * sizes[1]


def chosen_in(state: Any, views: int) -> int:
    """The number of the view in a state that somebody loads; -1 where it has none that there is."""
    choice = state.get("choice") if isinstance(state, Mapping) else None
    chosen = choice.get("chosen") if isinstance(choice, Mapping) else None
    return chosen if isinstance(chosen, int) and 0 <= chosen < views else -1
