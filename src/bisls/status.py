"""How things end: Status, with advice on what it means and what would help."""

from __future__ import annotations

from enum import IntEnum


class Status(IntEnum):
    """How a search or a linear solve ended. `advice` says what it means and what to do."""

    OK = 0
    STATIONARY = 1
    ROUNDING = 2
    BELOW_BOUND = 3
    CAPPED = 4
    NOT_DESCENT = 5
    NON_FINITE = 6
    MAX_ITERS = 7
    NEGATIVE_CURVATURE = 8
    DIVERGED = 9
    SINGULAR = 10
    DAMPED = 11
    LOWER_ROSE = 12
    NO_INFLUENCE = 13
    UPPER_ROSE = 14
    RESTARTED = 15
    LOWER_LOST = 16
    RETURNED = 17

    @property
    def advice(self) -> str:
        """A sentence on what happened and what would help."""
        return _ADVICE[self]

    @property
    def failed(self) -> bool:
        """Whether something went wrong, rather than being finished, undecidable or merely not worth a step."""
        return self not in _FINE


def worst(*statuses: Status) -> Status:
    """The most serious of several endings: failures before the rest."""
    return max(statuses, key=lambda status: (status.failed, status))


_FINE = {Status.OK, Status.STATIONARY, Status.ROUNDING, Status.NOT_DESCENT, Status.MAX_ITERS, Status.DAMPED}
_ADVICE = {
    Status.OK: "all went well",
    Status.STATIONARY: "the gradient is zero, or the loss is at its lower bound: nothing to do at this point",
    Status.ROUNDING: (
        "the loss changes by no more than its own rounding error, so the search could not judge the step; the remembered "
        "step was kept. Near a solution this is as it should be; float64 would show more"
    ),
    Status.BELOW_BOUND: (
        "the loss is below the lower bound declared as f_min, so a Polyak step is not defined and none was taken; "
        "declare a smaller f_min"
    ),
    Status.CAPPED: (
        "no step passed the Armijo test within max_checks; the best trial that lowered the loss was taken, or none. "
        "The slope may not belong to the loss (noise, a gradient of another batch), or the start was far too long"
    ),
    Status.NOT_DESCENT: (
        "the direction does not descend on the batch that judges it, so there was no search. Expected now and then with noise; "
        "if it persists, check the gradient"
    ),
    Status.NON_FINITE: (
        "a loss or gradient is NaN or infinite; the parameters were left as they were. Look for log(0), division by zero "
        "or overflow in the loss, for bad numbers in the data or an empty batch, or a far too large rate of a lower optimiser"
    ),
    Status.MAX_ITERS: (
        "the linear solve used all its iterations before reaching its tolerance; allow more of them, or make the lower "
        "problem better conditioned (more regularisation)"
    ),
    Status.NEGATIVE_CURVATURE: (
        "the lower Hessian is not positive definite here, so the lower problem is not at a minimum; run more lower steps "
        "or regularise the lower loss"
    ),
    Status.DIVERGED: (
        "the Neumann series diverges: its scale is larger than 2 / (largest curvature); give a smaller scale or none, "
        "so that it is estimated"
    ),
    Status.SINGULAR: (
        "the lower Hessian is singular, so the lower solution is not unique; add a small quadratic penalty to the lower loss"
    ),
    Status.DAMPED: (
        "the lower Hessian is not positive definite here, so the linear system was damped: the answer is how y responds nearby. "
        "With a network below this is the usual state of things"
    ),
    Status.LOWER_ROSE: (
        "the lower loss was higher after its steps than before them; a searched lower step (lower_step=Armijo()), Adam's scaling "
        "(lower_direction=Adam()) or your own optimiser (lower_optimizer=...) may suit this lower problem better"
    ),
    Status.NO_INFLUENCE: (
        "the hypergradient is exactly zero although the upper loss depends on y: x does not reach y. Does x appear in the lower "
        "loss, without a .detach()? Is the lower model dead (all units off, a saturated weight)?"
    ),
    Status.UPPER_ROSE: (
        "the running mean of the upper loss has been well above its lowest level for many iterations; look at the lower status, "
        "use larger batches, or give step_data that judge the steps"
    ),
    Status.RESTARTED: (
        "training was lost (losses above the first one for long, or gradients that had become exactly zero; at an upper level "
        "next to zero, where f would be lower with what it began with), so the parameters went back to where they began, and "
        "go on with a tenth of the step. If it happens again, look at the data and at the scale of the initial weights"
    ),
    Status.RETURNED: (
        "the loss had risen clearly above its lowest level, so the parameters went back (in a bi-level run y to its best point, "
        "where f was lower on the same batches, and x as well unless f is no higher with the present one; with `optim.Auto` to "
        "their average or their start), and the steps, the lower ones of a bi-level run, are a third as long from now on. "
        "Expected where y begins to learn its data by heart"
    ),
    Status.LOWER_LOST: (
        "the lower optimiser led far above where it began, or to a model whose gradients are zero, so its steps were undone: y, "
        "the optimiser and the buffers of modules are as before, and x was not moved. Give it a smaller rate (or a warm-up, or "
        "clipping), or leave lower_optimizer out, so that the steps set themselves"
    ),
}
