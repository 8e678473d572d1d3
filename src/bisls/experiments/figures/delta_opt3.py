"""Figure delta_opt3: the slack delta of the upper test over six orders, reset option 3 with eta = 10."""

from __future__ import annotations

from bisls.experiments.base import Asking, Figure, Plan
from bisls.experiments.figures.delta_opt1 import asking
from bisls.steps import Grow


def ask(plan: Plan) -> Asking:
    """Option 3."""
    return asking(plan, Grow(10.0))


FIGURE = Figure(
    name="delta_opt3",
    title="The slack delta with reset option 3 (hyper-representation)",
    paper="As with option 1: six orders of magnitude of slack make hardly any difference where the search grows by 10.",
    ask=ask,
    data=("mnist",),
)
