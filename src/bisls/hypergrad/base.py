"""What a hypergradient method takes and gives back, and the call that users make."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from math import nan
from typing import Any

import torch
from torch import Tensor

from bisls._check import having, settled
from bisls.agreement import agree_on_parameters
from bisls.batches import Sample
from bisls.derivatives import Following
from bisls.linear.base import LinearSolver, Solution, State
from bisls.lower import Effect, Lowered
from bisls.oracle import LowerGraph, MeanGraph, Oracle, UpperPoint
from bisls.problem import Bilevel, must_be_problem
from bisls.ranks import together
from bisls.states import FREE, Fields
from bisls.status import Status
from bisls.vector import Vector, norm


@dataclass(frozen=True)
class Hypergradient:
    """An estimate of the gradient of ``F(x) = f(x, y*(x))``.

    Attributes:
        value: f(x, y) on the upper batch.
        flat: The estimate as one vector.
        grads: The same, shaped like the upper parameters.
        residual: Relative residual of the linear system; NaN where the method has none.
        status: How the linear solve ended.
        lower_grad_norm: ||grad_y g(x, y)||: the formula assumes that it is small.
        state: What the next estimate may start from.
        graph: The lower graph at (x, y), for further products at the same point.
        upper: f and its gradients at (x, y), where the method evaluated them there; that in y may be empty.
        effect: What the lower steps do to f, where the method looks through them and somebody learns from it.
    """

    value: float
    flat: Tensor
    grads: tuple[Tensor, ...]
    residual: float
    status: Status
    lower_grad_norm: float
    state: State = field(default_factory=dict, repr=False)
    graph: LowerGraph | MeanGraph | None = field(default=None, repr=False)
    upper: UpperPoint | None = field(default=None, repr=False)
    effect: Effect = field(default_factory=Effect, repr=False)

    def uninfluenced(self, oracle: Oracle, upper_batch: Any, lower_batch: Any) -> bool:
        """Whether it is exactly zero because y does not respond to x at all, though f depends on y.

        To be asked before the parameters move. At a solution terms may cancel, and a linear solve that gave up at once leaves a
        zero too: neither counts. What the method has not evaluated at (x, y) is evaluated here, without a trace.

        Args:
            oracle: Evaluates both losses.
            upper_batch: What the upper loss is called with.
            lower_batch: What the lower loss is called with.
        """
        if self.status.failed or bool(self.flat.any()):
            return False
        upper, graph = self.upper, self.graph
        if upper is None or not upper.whole:
            with oracle.problem.probing():
                upper = oracle.upper(upper_batch)
        if not bool(upper.grad_y.any()):
            return False
        if graph is None:
            graph = oracle.lower_graph(lower_batch, oracle.problem.moment())
        any_vector = torch.linspace(0.5, 1.5, len(upper.grad_y)).to(upper.grad_y)
        return not bool(graph.mixed(any_vector).any())


class HypergradientMethod(ABC):
    """Estimates the hypergradient at the present (x, y)."""

    @abstractmethod
    def estimate(self, oracle: Oracle, upper_batch: Any, lower_batch: Any, state: State) -> Hypergradient:
        """Estimate it.

        Args:
            oracle: Evaluates both losses.
            upper_batch: What the upper loss is called with.
            lower_batch: What the lower loss is called with. A method that says `several` may also be given `Minibatches` or an
                iterator, as `bisls.batches.supply` reads them.
            state: That of an earlier estimate, or empty.
        """

    @property
    def several(self) -> bool:
        """Whether it looks at more than one lower batch where there are more."""
        return False

    @property
    def following(self) -> Following | None:
        """What of the lower steps' state it differentiates, where it looks through them (`look_back`); None: it does not."""
        return None

    def look_back(self, oracle: Oracle, upper_batch: Any, lowered: Lowered, state: State) -> Hypergradient:
        """The estimate through the lower steps of the iteration, for a method that says `following`."""
        raise NotImplementedError

    def after(self, oracle: Oracle, sample: Sample, lowered: Lowered, state: State) -> Hypergradient:
        """The estimate in an iteration whose lower steps were taken: through them, or at the point where they ended."""
        if self.following is not None:
            return self.look_back(oracle, sample.upper, lowered, state)
        return self.estimate(oracle, sample.upper, sample.estimating(self.several), state)

    @property
    def view(self) -> str:
        """Which problem it sees: "implicit", where y solves the lower problem, or "t-step", where it is trained for T steps."""
        return "implicit" if self.following is None else "t-step"

    @property
    def extra_batches(self) -> int:
        """How many lower batches it wants that no lower step has seen, where the lower data are batches."""
        return 0

    @property
    def solver(self) -> LinearSolver | None:
        """The linear solver behind it, which a response may use as well; None where it has none."""
        return None

    def keeps(self, y: Vector | None) -> Fields:
        """What its state may be with these lower parameters, for one that is loaded; anything, where it does not say."""
        return FREE


def estimated(
    oracle: Oracle,
    upper: UpperPoint,
    flat: Tensor,
    *,
    solution: Solution | None = None,
    status: Status = Status.OK,
    state: State | None = None,
    graph: LowerGraph | MeanGraph | None = None,
    lower_grad_norm: float | None = None,
    here: bool = True,
) -> Hypergradient:
    """Put an estimate together.

    Args:
        oracle: Knows the shapes of x.
        upper: f and its gradients.
        flat: The estimate.
        solution: The linear solve behind it; its residual, status and state are taken over.
        status: How it ended, where there is no such solve.
        state: What the next estimate may start from, if not that of the solution.
        graph: The lower graph at (x, y).
        lower_grad_norm: ||grad_y g|| at the end, if not that of the graph.
        here: Whether ``upper`` was evaluated at (x, y).
    """
    if lower_grad_norm is None:
        grad = None if graph is None else graph.grad if isinstance(graph, MeanGraph) else graph.freed(graph.grad)
        lower_grad_norm = nan if grad is None else norm(grad)
    return Hypergradient(
        value=upper.value,
        flat=flat,
        grads=oracle.problem.x.split(flat),
        residual=nan if solution is None else solution.residual,
        status=status if solution is None else solution.status,
        lower_grad_norm=lower_grad_norm,
        state=state if state is not None else {} if solution is None else solution.state,
        graph=graph,
        upper=upper if here else None,
    )


@together
def hypergradient(problem: Bilevel, upper_batch: Any, lower_batch: Any, method: HypergradientMethod) -> Hypergradient:
    """The hypergradient of a problem at its present (x, y).

    ``grad F(x) ~ grad_x f - g_xy g_yy^-1 grad_y f`` (the paper's equation 2; g_xy, g_yy second derivatives of g)

    The parameters are not moved, nor is their ``.grad`` touched.

    Args:
        problem: The problem.
        upper_batch: What the upper loss is called with.
        lower_batch: What the lower loss is called with; an iterator of batches where the method draws fresh ones.
        method: `Implicit`, `StochasticNeumann` or `Unrolled`.

    Returns:
        A `Hypergradient` with ``value``, ``grads``, ``flat`` and ``residual``.

    Raises:
        FloatingPointError: A loss or the estimate is not finite at this point.

    Examples:
        >>> import torch, bisls
        >>> x = torch.tensor([0.5], requires_grad=True)
        >>> y = torch.tensor([0.5, 0.5], requires_grad=True)  # y*(x) = (x, x)
        >>> problem = bisls.Bilevel(lambda _: ((y - 3.0) ** 2).sum(), lambda _: ((y - x) ** 2).sum(), [x], [y])
        >>> bisls.hypergradient(problem, None, None, bisls.Implicit(bisls.CG(iters=10))).flat  # 4 (x - 3)
        tensor([-10.])
    """
    must_be_problem("hypergradient", problem)
    must_solve_kinks("hypergradient", "method", method, problem)
    agree_on_parameters("hypergradient(...)", problem.levels)
    hg = must_estimate("hypergradient", method).estimate(Oracle(problem), upper_batch, lower_batch, {})
    if not abs(hg.value) < float("inf"):
        raise FloatingPointError(
            f"`hypergradient(...)`: upper_loss is {hg.value} at the present parameters. {Status.NON_FINITE.advice}"
        )
    if not bool(torch.isfinite(hg.flat).all()):
        raise FloatingPointError(f"`hypergradient(...)`: the estimate is not finite. {Status.NON_FINITE.advice}")
    return hg


def must_solve_kinks(call: str, name: str, method: Any, problem: Bilevel) -> None:
    """Refuse a method that looks through lower steps where the lower problem has an L1 term: they do not end at its zeros."""
    if problem.lower_l1 is not None and getattr(method, "view", "implicit") != "implicit":
        raise ValueError(
            f"`{call}({name}={method!r})`: it looks through steps, and a lower problem with an L1 term (lower_l1) is solved, not "
            "stepped through; use `Implicit(CG())`, which is exact there"
        )


def must_estimate(call: str, method: Any) -> HypergradientMethod:
    """The method, with the defaults of its base class; refuses what is none, and shows a linear solver how to become one."""
    wrap = f"; wrap the linear solver: `Implicit({method!r})`" if isinstance(method, LinearSolver) else ""
    wanted = having(HypergradientMethod, f"must be a hypergradient such as `Implicit(CG())`{wrap}")
    found: HypergradientMethod = settled(call, "method", method, wanted)
    return found
