"""What surrounds a step of a torch optimiser: the hooks of the user's, and what it holds, to be put back after trials."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from itertools import cycle, islice
from typing import Any

import torch
from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop

from bisls.derivatives import Adjoint, Derivative, Following
from bisls.vector import Vector, dot, norm

logger = logging.getLogger(__name__)
BEFORE, AFTER = "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"
READERS = (SGD, Adam, AdamW, RMSprop)  # they only read gradients (but for Nesterov's way)
FLAT = 5  # so many steps that do not change with gradients are enough
EVEN = 0.02  # two ways to take one product agree up to so much of its size


class Hooks:
    """Steps of an optimiser with the user's hooks around them, called one by one so that it is seen what they do.

    A hook before a step may change gradients (clipping, unscaling): what it does is differentiated by trying it. A hook after a
    step that leaves the parameters alone (a schedule, an average of weights) looks on: it is not called for steps that are
    only tried or repeated.

    Args:
        optimizer: Whose hooks they are.
        vector: The lower parameters.
    """

    def __init__(self, optimizer: Optimizer, vector: Vector):
        self.optimizer, self.vector = optimizer, vector
        self.shaping = False  # hooks after a step have written into the parameters
        self._even: bool | None = None  # whether the derivative of the hooks before a step is symmetric
        self._steps_even: bool | None = None  # whether that of a step is, where it is tried
        self._flat = 0  # steps in a row that did not change with their gradients

    def prepare(self, gradient: Tensor) -> Tensor:
        """Put a gradient into ``.grad`` and call the hooks before a step; what they leave there, flat."""
        vector, hooks, lent = self.vector, list(getattr(self.optimizer, BEFORE, {}).values()), self.lends
        for tensor, part in zip(vector.tensors, vector.cast(gradient), strict=True):
            tensor.grad = part if lent else part.clone()
        for (
            hook
        ) in hooks:  # torch minds what they return (clip_grad_norm_ returns the norm); here it makes no difference
            hook(self.optimizer, (self.optimizer,), {})
        return vector.join([tensor.grad for tensor in vector.tensors]) if hooks else gradient

    @property
    def lends(self) -> bool:
        """Whether a step gets the gradient itself: nobody writes into it, or keeps it."""
        optimizer = self.optimizer
        if getattr(optimizer, BEFORE, None) or self.shaping or type(optimizer) not in READERS:
            return False
        return not any(group.get("nesterov") or group.get("differentiable") for group in optimizer.param_groups)

    def step(self, trial: bool = False) -> None:
        """One step with what is in ``.grad``, and the hooks after it; in a trial those that only look on are left out."""
        with self._aside(), torch.enable_grad():
            self.optimizer.step()
        hooks = list(getattr(self.optimizer, AFTER, {}).values())
        if not hooks or (trial and not self.shaping):
            return
        before = [tensor._version for tensor in self.vector.tensors]
        for hook in hooks:
            hook(self.optimizer, (self.optimizer,), {})
        self.shaping = self.shaping or before != [tensor._version for tensor in self.vector.tensors]

    @contextmanager
    def _aside(self) -> Iterator[None]:
        own = {name: getattr(self.optimizer, name) for name in (BEFORE, AFTER) if hasattr(self.optimizer, name)}
        try:
            for name in own:
                setattr(self.optimizer, name, OrderedDict())
            yield
        finally:
            for name, hooks in own.items():
                setattr(self.optimizer, name, hooks)

    def around(self, inner: Derivative | None, given: Tensor, prepared: Tensor) -> Derivative | None:
        """The derivative of a step by the gradient that the hooks were given, from that by what they left."""
        if inner is None or given is prepared or torch.equal(given, prepared):
            return inner
        product = self._product(given)
        if self._even is None:
            self._even = symmetric(product, given)
            if not self._even:
                logger.info("hooks before the lower steps mix gradients in a way of their own: they count as scaling")
        if not self._even:
            ratio = torch.where(given == 0, torch.ones_like(given), prepared / given)
            return Hooked(inner, prepared, lambda v: ratio * v)
        return Hooked(inner, prepared, product)

    def followable(self, product: Callable[[Tensor], Tensor], gradient: Tensor) -> bool:
        """Whether tried steps can be gone back through: they change with gradients, and symmetrically.

        The first step of an Adam looks at signs alone, so a few that do not change are no reason; what is found is kept.

        Args:
            product: Of the derivative of the present step.
            gradient: That of the step.
        """
        if self._steps_even is None and bool(gradient.any()):
            changes = bool(product(gradient.abs() + gradient.abs().mean()).any())
            self._flat = 0 if changes else self._flat + 1
            self._steps_even = symmetric(product, gradient) if changes else False if self._flat >= FLAT else None
        return self._steps_even is not False

    def _product(self, given: Tensor) -> Callable[[Tensor], Tensor]:
        """v -> J v, J the derivative of what the hooks do to a gradient."""

        def product(v: Tensor) -> Tensor:
            with unchanged(self.optimizer, self.vector):
                return difference(self.prepare, given, v)

        return product


class Hooked(Derivative):
    """A step whose gradient was changed before it.

    Args:
        inner: The step.
        prepared: The gradient that it was taken with.
        product: v -> J v, J the derivative of that gradient by the one of the loss, symmetric.
    """

    def __init__(self, inner: Derivative, prepared: Tensor, product: Callable[[Tensor], Tensor]):
        self.inner, self.prepared, self.product = inner, prepared, product

    def back(self, after: Adjoint, gradient: Callable[[], Tensor], following: Following) -> tuple[Adjoint, Tensor]:
        """Back through the step, then through the change."""
        owed, v = self.inner.back(after, lambda: self.prepared, following)
        return owed, self.product(v)


@contextmanager
def unchanged(optimizer: Optimizer, vector: Vector) -> Iterator[None]:
    """Steps may be tried within this context: afterwards optimiser, parameters and gradients are what they were.

    Graphs that were recorded before stay usable, since the parameters get the same values back.
    """
    y = [tensor.detach().clone() for tensor in vector.tensors]
    grads = [tensor.grad for tensor in vector.tensors]
    with ExitStack() as kept:
        kept.enter_context(holding(optimizer))
        for tensor in vector.tensors:
            kept.enter_context(_unsafe_preserve_version_counter(tensor))
        try:
            yield
        finally:
            for tensor, own, grad in zip(vector.tensors, y, grads, strict=True):
                tensor.data.copy_(own)
                tensor.grad = grad


@contextmanager
def holding(optimizer: Optimizer) -> Iterator[None]:
    """Whatever happens to an optimiser within this context, it holds afterwards what it holds now: state, groups, numbers."""
    state = {key: deepcopy(own) for key, own in optimizer.state.items()}
    groups = [{name: _copied(own) for name, own in group.items()} for group in optimizer.param_groups]
    plain = {
        name: _copied(own) for name, own in vars(optimizer).items() if isinstance(own, bool | int | float | Tensor)
    }
    try:
        yield
    finally:
        optimizer.state.clear()
        optimizer.state.update(state)
        for group, own in zip(optimizer.param_groups, groups, strict=True):
            group.update(own)
        vars(optimizer).update(plain)


def difference(function: Callable[[Tensor], Tensor], at: Tensor, v: Tensor, part: float = 1.0) -> Tensor:
    """The derivative of a function along v by a central difference, over so much of the usual way."""
    size = norm(v)
    if size == 0.0:
        return torch.zeros_like(v)
    info = torch.finfo(at.dtype)
    # each number of the gradient is moved by a small part of itself, or of the usual one
    e = part * info.eps ** (1 / 3) * max(norm(at), info.tiny) / size
    return (function(at + e * v) - function(at - e * v)) / (2 * e)


def symmetric(product: Callable[[Tensor], Tensor], like: Tensor) -> bool:
    """Whether ``<a, D b> = <b, D a>`` for two vectors that have every coordinate in them."""
    signs = [torch.tensor(list(islice(cycle(row), like.numel()))).to(like) for row in ((1, 1, -1), (1, -1, -1, 1, 1))]
    a, b = (sign * (like.abs() + like.abs().mean()) for sign in signs)
    by_a, by_b = product(a), product(b)
    return abs(dot(a, by_b) - dot(b, by_a)) <= EVEN * (norm(a) * norm(by_b) + norm(b) * norm(by_a)) / 2


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value
