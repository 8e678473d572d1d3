"""optimistix: the lower problem solved to a tolerance by BFGS, differentiated implicitly; one compiled step an iteration."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optimistix
from work import Keep, work

PENALTIES = {"sigmoid": jax.nn.sigmoid, "exp": jnp.exp}


def bfgs(job: SimpleNamespace, keep: Keep) -> None:
    arrays = np.load(job.problem)
    train, truth = jnp.asarray(arrays["train_x"]), jnp.asarray(arrays["train_y"])
    new, new_truth = jnp.asarray(arrays["validation_x"]), jnp.asarray(arrays["validation_y"])
    penalty = PENALTIES[job.penalty]

    def lower(w: Any, x: Any) -> Any:
        scores = train @ w
        return (jax.nn.softplus(scores) - truth * scores).mean() + 0.5 * (penalty(x) * w * w).sum()

    solver = optimistix.BFGS(rtol=1e-5, atol=1e-5)
    adam = optax.adam(job.alpha)

    def outer(x: Any, w: Any) -> Any:
        found = optimistix.minimise(lower, solver, jax.lax.stop_gradient(w), args=x, throw=False).value
        scores = new @ found
        return (jax.nn.softplus(scores) - new_truth * scores).mean(), found

    @jax.jit
    def step(x: Any, w: Any, state: Any) -> Any:
        (_, found), gradient = jax.value_and_grad(outer, has_aux=True)(x, w)
        change, state = adam.update(gradient, state)
        return optax.apply_updates(x, change), found, state

    x, w = jnp.zeros(train.shape[1]), jnp.zeros(train.shape[1])
    state = adam.init(x)
    keep(np.asarray(x))
    while True:
        x, w, state = step(x, w, state)
        keep(np.asarray(x))


if __name__ == "__main__":
    work({"penalties": {"BFGS": bfgs}}, ["optimistix", "jax", "optax"])
