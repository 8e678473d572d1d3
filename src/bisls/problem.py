"""Bilevel: two losses and two lists of parameters, checked when they are put together."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from bisls._check import FLAG, Wrong, function, having, instance, iterable, optional, require_argument, settled
from bisls.bounds import Bounds, Kinks
from bisls.overlap import overlapping
from bisls.ranks import WHOLE, sharded
from bisls.replicas import quiet
from bisls.still import Moment, kept, still
from bisls.surroundings import Surroundings
from bisls.vector import Vector

Loss = Callable[[Any], Tensor]


class Bilevel:
    """A bi-level problem: minimise ``f(x, y*(x))`` over x, where ``y*(x)`` minimises ``g(x, y)`` over y.

    Args:
        upper_loss: ``batch -> scalar tensor``, the loss f; closes over the modules whose parameters are passed here.
        lower_loss: ``batch -> scalar tensor``, the loss g; it must depend on the lower parameters.
        upper_params: The tensors x: leaves that require grad.
        lower_params: The tensors y: leaves that require grad, none of which is also an upper parameter.
        buffers: Tensors that a forward pass changes and that must be put back after a probe. The buffers of `nn.Module`s
            in training mode (BatchNorm's statistics) are found by themselves; this is for state kept anywhere else.
        upper_bounds: Where x may go: `Box(low, high)`, or an object with ``project(flat, vector)``. Searches stay inside.
        lower_bounds: The same for y. Coordinates that sit on a bound of a `Box` do not respond to x, and the hypergradient
            treats them so.
        lower_l1: Adds ``sum_j p_j |y_j|`` to the lower loss: a function of nothing that returns the weights p, at least 0,
            computed from x: a tensor (or number) that goes with every lower parameter, or a list with one for each of them.
            `BiSLS` solves such problems by `CoordinateDescent`; coordinates that are zero do not respond to x. Not with
            ``lower_bounds``.
        lower_start: Where y begins in every iteration: a function that returns tensors like the lower parameters, computed from
            the upper ones (meta-learning: y begins at x) or not (a fresh y for each batch). It takes nothing, or the lower batch.
            Gradients flow through it where the hypergradient looks through the steps (`Lookahead`). Upper and lower batch
            of an iteration then belong together. None: y goes on from where it is.
        tape: Has no effect any more; True, False and None are taken, so that older programs run.

    Examples:
        >>> import torch, bisls
        >>> x = torch.tensor([0.5], requires_grad=True)
        >>> y = torch.tensor([2.0, -1.0], requires_grad=True)
        >>> problem = bisls.Bilevel(
        ...     upper_loss=lambda batch: ((y - 3.0) ** 2).sum(),
        ...     lower_loss=lambda batch: ((y - x) ** 2).sum(),
        ...     upper_params=[x],
        ...     lower_params=[y],
        ... )
        >>> problem
        Bilevel(upper_params: 1 tensor, 1 number; lower_params: 1 tensor, 2 numbers)
    """

    def __init__(
        self,
        upper_loss: Loss,
        lower_loss: Loss,
        upper_params: Iterable[Tensor],
        lower_params: Iterable[Tensor],
        buffers: Iterable[Tensor] = (),
        *,
        upper_bounds: Bounds | None = None,
        lower_bounds: Bounds | None = None,
        lower_l1: Callable[[], Any] | None = None,
        lower_start: Callable[..., Any] | None = None,
        tape: bool | None = None,
    ):
        called = function(1, "must be a callable that takes a batch and returns a scalar tensor")
        for name, loss in (("upper_loss", upper_loss), ("lower_loss", lower_loss)):
            settled("Bilevel", name, loss, called)
        settled("Bilevel", "tape", tape, optional(FLAG))
        rule = "must be a function of nothing, or of the lower batch, that returns tensors like lower_params; or None"
        require_argument(
            "Bilevel", "lower_start", lower_start, lower_start is None or _taken(lower_start) is not None, rule
        )
        rule = "must be a function of nothing that returns the weights of the absolute values, or None"
        settled("Bilevel", "lower_l1", lower_l1, optional(function(0, rule), rule))
        if lower_l1 is not None and lower_bounds is not None:
            raise ValueError(
                "`Bilevel(lower_l1=..., lower_bounds=...)`: pass one of the two; inside bounds write y = u - v, both in a "
                "Box(low=0.0), and the L1 term as u + v in lower_loss"
            )
        upper = _checked("upper_params", upper_params)
        lower = _checked("lower_params", lower_params)
        shared = {id(tensor) for tensor in upper} & {id(tensor) for tensor in lower}
        if shared:
            at = next(i for i, tensor in enumerate(lower) if id(tensor) in shared)
            raise ValueError(
                f"`Bilevel(lower_params=...)`: tensor {at} (shape {tuple(lower[at].shape)}) is also in upper_params; "
                "each parameter belongs to one level. Leave it out of one of the two lists."
            )
        _apart(upper, lower)
        devices = sorted({str(tensor.device) for tensor in (*upper, *lower)})
        if len(devices) > 1:
            raise ValueError(
                f"`Bilevel(upper_params=..., lower_params=...)`: parameters are spread over {', '.join(devices)}; "
                "move them to one device."
            )
        self.upper_loss = upper_loss
        self.lower_loss = lower_loss
        self.x = Vector(upper)
        self.y = Vector(lower)
        self.lower_start = lower_start
        self._start_takes = None if lower_start is None else _taken(lower_start)
        self.buffers = _listed("buffers", buffers)
        self._around: Surroundings | None = None
        self.upper_bounds = _settled("upper_bounds", upper_bounds, self.x)
        self.lower_l1, self._smooth = lower_l1, lower_loss
        if lower_l1 is not None:
            self.lower_loss = self._kinked
        kinks = None if lower_l1 is None else Kinks(self.l1_weights)
        self.lower_bounds = kinks or _settled("lower_bounds", lower_bounds, self.y)

    @property
    def levels(self) -> dict[str, tuple[Tensor, ...]]:
        """The parameters, by the names of the arguments."""
        return {"upper_params": self.x.tensors, "lower_params": self.y.tensors}

    def _kinked(self, batch: Any) -> Any:
        """The lower loss with its L1 term; a loss that is no tensor is refused by those who look at it."""
        loss = self._smooth(batch)
        pairs = zip(self._l1_weights(), self.y.tensors, strict=True)
        return loss + sum((weight * y.abs()).sum() for weight, y in pairs) if isinstance(loss, Tensor) else loss

    def l1_weights(self) -> Tensor:
        """The weights of ``lower_l1`` at the present x, flat.

        Raises:
            ValueError: They do not go with the lower parameters.
        """
        with torch.no_grad():
            return self.y.join(self._l1_weights()).clone()

    def _l1_weights(self) -> list[Tensor]:
        """One for each lower parameter, of its shape."""
        assert self.lower_l1 is not None
        found, own, call = self.lower_l1(), self.y.tensors, "`Bilevel(lower_l1=...)`"
        several = isinstance(found, list | tuple)
        if several and len(found) != len(own):
            raise ValueError(f"{call} returned {len(found)} weights; lower_params has {len(own)} tensors")
        made = []
        for weight, y in zip(found if several else [found] * len(own), own, strict=True):
            weight = torch.as_tensor(weight, dtype=y.dtype, device=y.device)
            try:
                made.append(weight.expand_as(y))
            except RuntimeError:
                raise ValueError(
                    f"{call} returned weights of shape {tuple(weight.shape)}, which do not go with a lower parameter of shape "
                    f"{tuple(y.shape)}"
                ) from None
        return made

    def start(self, batch: Any) -> tuple[Tensor, ...]:
        """What ``lower_start`` gives at the present x, checked.

        Raises:
            ValueError: It is not shaped like the lower parameters.
        """
        assert self.lower_start is not None
        found = self.lower_start(batch) if self._start_takes else self.lower_start()
        found = (found,) if isinstance(found, Tensor) else found
        call = "`Bilevel(lower_start=...)`"
        if not iterable(found):
            raise ValueError(f"{call} must return tensors like lower_params, got {type(found).__name__}")
        tensors, own = tuple(found), self.y.tensors
        shapes = [tuple(t.shape) if isinstance(t, Tensor) else type(t).__name__ for t in tensors]
        wanted = [tuple(t.shape) for t in own]
        if shapes != wanted:
            raise ValueError(f"{call} must return tensors like lower_params, of shapes {wanted}; it returned {shapes}")
        return tensors

    def moment(self) -> Moment:
        """The present state of the random generators, for `probing`."""
        return Moment.now(self.y.device, self.around)

    def probing(self, replay: Moment | None = None) -> AbstractContextManager[None]:
        """A context in which losses may be evaluated without a trace; with the random numbers of the moment given."""
        return still(self.y.device, replay, self.buffers, self, self.around)

    def kept(self) -> Callable[[], None]:
        """What puts the buffers of all modules that the losses reach, and those declared, back to what they are now."""
        return kept(self.buffers, self.around)

    def quiet(self) -> AbstractContextManager[None]:
        """A context in which modules that are wrapped for several processes exchange nothing by themselves."""
        return quiet(self.around.modules)

    @property
    def around(self) -> Surroundings:
        """What the losses can reach beside their batches, as it was when somebody last looked (`look_around`)."""
        return self._around or self.look_around()

    def look_around(self) -> Surroundings:
        """What the losses can reach now. Solvers look once an iteration: generators may come and go."""
        trained = (*self.x.tensors, *self.y.tensors)
        lower = self.lower_loss if self.lower_l1 is None else self._smooth
        others = [own for own in (self.lower_start, self.lower_l1) if own is not None]
        self._around = Surroundings(self.upper_loss, lower, *others, trained=trained)
        return self._around

    def __repr__(self) -> str:
        def count(n: int, what: str) -> str:
            return f"{n:,} {what}" if n == 1 else f"{n:,} {what}s"

        x, y = (f"{count(len(v.tensors), 'tensor')}, {count(v.numel, 'number')}" for v in (self.x, self.y))
        return f"Bilevel(upper_params: {x}; lower_params: {y})"


def _taken(start: Any) -> int | None:
    """How many arguments ``lower_start`` is called with: 0 or 1; None where it can't be called so."""
    for n in (0, 1):  # a default may stand for something that the function closes over
        try:
            function(n, "").read(start)
        except Wrong:
            continue
        return n
    return None


def _apart(upper: tuple[Tensor, ...], lower: tuple[Tensor, ...]) -> None:
    """Refuse two parameters that lie in the same memory: moving one would move the other."""
    names = [f"{name} {i}" for name, own in (("upper_params", upper), ("lower_params", lower)) for i in range(len(own))]
    tensors = (*upper, *lower)
    shared = overlapping(tensors)
    if shared is None:
        return
    (other, _, j), (name, _, i) = (names[place].partition(" ") for place in shared)
    what = f"`Bilevel({name}=...)`: tensor {i} (shape {tuple(tensors[shared[1]].shape)})"
    if shared[0] == shared[1]:
        raise ValueError(f"{what} has numbers that share one place in memory; copy it: tensor.detach().clone()")
    raise ValueError(
        f"{what} shares its memory with tensor {j} of {other} (shape {tuple(tensors[shared[0]].shape)}); copy one of them: "
        "tensor.detach().clone().requires_grad_()"
    )


def _settled(name: str, bounds: Any, vector: Vector) -> Bounds | None:
    if bounds is None:
        return None
    wanted = having(Bounds, "must be a Box(low, high), an object with project(flat, vector), or None")
    bounds = settled("Bilevel", name, bounds, wanted)
    start = vector.read()
    nearest: Tensor = bounds.project(start, vector)
    if not torch.equal(start, nearest):
        raise ValueError(
            f"`Bilevel({name}=...)`: the parameters start outside their bounds (by {(start - nearest).abs().max().item():.3g} at "
            "most); move them inside first"
        )
    return bounds


def _listed(name: str, tensors: Any) -> tuple[Tensor, ...]:
    """Tensors, from a list or any other iterable of them."""
    call = f"`Bilevel({name}=...)`"
    if isinstance(tensors, Tensor):
        raise ValueError(f"{call} must be a list of tensors; put the single tensor into a list: [tensor]")
    if isinstance(tensors, torch.nn.Module):
        raise ValueError(
            f"{call} must be tensors, got a module; pass module.{'buffers' if name == 'buffers' else 'parameters'}()"
        )
    if not iterable(tensors):
        raise ValueError(f"{call} must be a list of tensors, got {type(tensors).__name__}")
    found = tuple(tensors)
    for i, tensor in enumerate(found):
        if not isinstance(tensor, Tensor):
            raise ValueError(f"{call}: entry {i} is a {type(tensor).__name__}, not a tensor")
    return found


def must_be_problem(call: str, problem: Any) -> None:
    """Refuse what is no problem."""
    settled(call, "problem", problem, instance(Bilevel, "must be a Bilevel(upper_loss, lower_loss, ...)"))


def _checked(name: str, tensors: Iterable[Tensor]) -> tuple[Tensor, ...]:
    call = f"`Bilevel({name}=...)`"
    tensors = _listed(name, tensors)
    if not tensors:
        raise ValueError(
            f"{call} is empty; pass at least one tensor that requires grad (a generator such as "
            "module.parameters() can be read only once)"
        )
    for i, tensor in enumerate(tensors):
        what = f"{call}: tensor {i} (shape {tuple(tensor.shape)})"
        if sharded(tensor):
            raise ValueError(f"{what} is {sharded(tensor)}: {WHOLE}")
        if not tensor.is_floating_point():
            raise ValueError(f"{what} has dtype {tensor.dtype}; only real floating-point parameters can be optimised")
        if tensor.layout is not torch.strided:
            raise ValueError(f"{what} is sparse; pass a dense tensor (tensor.to_dense())")
        if not tensor.requires_grad:
            raise ValueError(f"{what} does not require grad; call requires_grad_() on it or leave it out")
        if any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
            raise ValueError(f"{what} was expanded, so its numbers share one place; copy it: tensor.clone()")
        if not tensor.is_leaf:
            raise ValueError(
                f"{what} is the result of a computation, not a leaf; optimise the tensor it was computed from, "
                "or detach it: tensor.detach().requires_grad_()"
            )
    if len({id(tensor) for tensor in tensors}) < len(tensors):
        raise ValueError(f"{call} lists the same tensor twice; each parameter may appear once")
    if sum(tensor.numel() for tensor in tensors) == 0:
        raise ValueError(f"{call}: all tensors are empty (no numbers to optimise)")
    return tensors
