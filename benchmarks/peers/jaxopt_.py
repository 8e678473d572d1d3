"""jaxopt: implicit differentiation of four of its solvers for the lower problem; one compiled step an iteration."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import jaxopt
import numpy as np
import optax
from work import Keep, work

PENALTIES = {"sigmoid": jax.nn.sigmoid, "exp": jnp.exp}


def losses(job: SimpleNamespace) -> tuple[Callable[..., Any], Callable[..., Any], int]:
    arrays = np.load(job.problem)
    train, truth = jnp.asarray(arrays["train_x"]), jnp.asarray(arrays["train_y"])
    new, new_truth = jnp.asarray(arrays["validation_x"]), jnp.asarray(arrays["validation_y"])
    penalty = PENALTIES[job.penalty]

    def lower(w: Any, x: Any) -> Any:
        scores = train @ w
        return (jax.nn.softplus(scores) - truth * scores).mean() + 0.5 * (penalty(x) * w * w).sum()

    def upper(w: Any) -> Any:
        scores = new @ w
        return (jax.nn.softplus(scores) - new_truth * scores).mean()

    return lower, upper, train.shape[1]


def run(make: Callable[[Any, dict[str, Any], SimpleNamespace], Any]) -> Callable[[SimpleNamespace, Keep], None]:
    def go(job: SimpleNamespace, keep: Keep) -> None:
        lower, upper, size = losses(job)
        common = {
            "maxiter": job.lower_iters,
            "tol": 0.0,
            "implicit_diff": True,
            "implicit_diff_solve": partial(jaxopt.linear_solve.solve_cg, maxiter=job.cg),
        }
        solver = make(lower, common, job)
        adam = optax.adam(job.alpha)

        def outer(x: Any, w: Any) -> Any:
            found = solver.run(jax.lax.stop_gradient(w), x).params
            return upper(found), found

        @jax.jit
        def step(x: Any, w: Any, state: Any) -> Any:
            (_, found), gradient = jax.value_and_grad(outer, has_aux=True)(x, w)
            change, state = adam.update(gradient, state)
            return optax.apply_updates(x, change), found, state

        x, w = jnp.zeros(size), jnp.zeros(size)
        state = adam.init(x)
        keep(np.asarray(x))
        while True:
            x, w, state = step(x, w, state)
            keep(np.asarray(x))

    return go


def gradient_descent(lower: Any, common: dict[str, Any], job: SimpleNamespace) -> Any:
    return jaxopt.GradientDescent(lower, stepsize=job.beta, acceleration=False, **common)


def armijo(lower: Any, common: dict[str, Any], job: SimpleNamespace) -> Any:
    return jaxopt.ArmijoSGD(lower, **common)


def polyak(lower: Any, common: dict[str, Any], job: SimpleNamespace) -> Any:
    return jaxopt.PolyakSGD(lower, **common)


def lbfgs(lower: Any, common: dict[str, Any], job: SimpleNamespace) -> Any:
    return jaxopt.LBFGS(lower, **common)


if __name__ == "__main__":
    variants = {
        "gradient descent": run(gradient_descent),
        "Armijo": run(armijo),
        "Polyak": run(polyak),
        "L-BFGS": run(lbfgs),
    }
    work({"penalties": variants}, ["jaxopt", "jax", "optax"])
