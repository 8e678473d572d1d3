"""Layers whose second derivatives cost no more than they must, for a graph of a gradient that is gone back through once.

PyTorch evaluates the gradient of every weight with a graph before anybody can go back through it. Only that graph is wanted, not
its value; and going back through a convolution it evaluates more than is asked for. Within `Lean` linear layers and convolutions
do without both. What they give is the same, to rounding; every other operation is PyTorch's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional
from torch.overrides import TorchFunctionMode

# multiplications in a layer: below that Python takes longer than what is saved, which for convolutions is more
LEAST, LEAST_CONVOLVED = 1 << 24, 1 << 21
PLAIN = (Tensor, nn.Parameter)


class Lean(TorchFunctionMode):
    """Within this context layers are lean. It is to be entered for the loss.

    Attributes:
        slope: ``<g, v>``, as far as it belongs to gradients whose value nobody has: after the last pass.

    Args:
        weights: Leaves whose gradients are wanted; other weights may be whatever they are.
        valued: Whether the gradients are wanted as numbers too.
    """

    def __init__(self, weights: Sequence[Tensor], valued: bool = False):
        super().__init__()
        self._leaves = {id(own) for own in weights if not own._backward_hooks}  # a hook would look at the gradient
        self._valued = valued
        self._recording = False
        self._zeros: dict[torch.dtype, Tensor] = {}
        self._both, self._targets = True, dict[int, Tensor]()
        self.slope = 0.0

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Within this context going back records: the gradient of the loss, and nothing that the loss itself differentiates."""
        self._recording = True
        try:
            yield
        finally:
            self._recording = False

    def skips(self, weight: Tensor) -> bool:
        """Whether nobody looks at the value of the gradient of a weight that is now evaluated."""
        return self._recording and not self._valued and id(weight) in self._leaves

    def nothing(self, weight: Tensor) -> Tensor:
        """A tensor of the right shape that takes no memory, in the place of a value that nobody looks at."""
        if weight.dtype not in self._zeros:
            self._zeros[weight.dtype] = weight.new_zeros(())
        return self._zeros[weight.dtype].expand(weight.shape)

    def left_out(self, part: Tensor) -> bool:
        """Whether a gradient is such a tensor."""
        zero = self._zeros.get(part.dtype)
        return zero is not None and part.data_ptr() == zero.data_ptr()

    def end(self, both: bool, targets: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Before the last pass.

        Args:
            both: Whether it is to go on to the weights.
            targets: Weights, each with a tensor like it that its product is to be taken from.
        """
        self._both = both
        pairs = ((id(weight), own) for weight, own in targets if own.dtype == weight.dtype)
        self._targets = {place: own for place, own in pairs if place in self._leaves}

    def stops(self, weight: Tensor) -> bool:
        """Whether the last pass need not go on to a weight."""
        return not self._both and id(weight) in self._leaves

    def took(self, weight: Tensor, left: Tensor, right: Tensor) -> bool:
        """Whether a product of matrices, a part of the one for a weight, has been taken from where it belongs."""
        target = self._targets.get(id(weight))
        if target is not None:
            target.addmm_(left, right, alpha=-1)
        return target is not None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """A call of any function of torch."""
        layer = LAYERS.get(func)
        made = NotImplemented if layer is None else layer(self, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {})) if made is NotImplemented else made


def _worth(given: Any, weight: Any, work: int, least: int) -> bool:
    """Whether a layer is one of those that are written out here, and large enough."""
    if work < least or given.dtype != weight.dtype or not given.is_floating_point() or given.device.type != "cpu":
        return False  # elsewhere nobody has measured it
    if not (weight.requires_grad and torch.is_grad_enabled()) or torch.is_autocast_enabled("cpu"):
        return False
    # a transform of torch.func has rules of its own, and a checkpoint evaluates again what it has seen, outside of this context
    return torch._C._functorch.peek_interpreter_stack() is None and _stored is not None and _stored(True) is None


_stored = getattr(
    torch._C._autograd, "_top_saved_tensors_default_hooks", None
)  # who is asked what to store; newer torch alone


def _linear(mode: Lean, input: Any, weight: Any, bias: Any = None) -> Any:
    if type(input) not in PLAIN or type(weight) not in PLAIN or weight.dim() != 2 or input.dim() < 2:
        return NotImplemented
    if not _worth(input, weight, input.numel() * weight.shape[0], LEAST):
        return NotImplemented
    return _Linear.apply(input, weight, bias, mode)  # type: ignore[no-untyped-call]


class _Linear(Function):
    """``input W^T + bias``."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, mode: Lean) -> Tensor:
        ctx.save_for_backward(input, weight)
        ctx.mode = mode
        return functional.linear(input, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        input, weight = ctx.saved_tensors
        return *_LinearBack.apply(grad, input, weight, ctx.needs_input_grad, ctx.mode), None  # type: ignore[no-untyped-call]


class _LinearBack(Function):
    """``grad W``, ``grad^T input`` and the sum of ``grad``."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, input: Tensor, weight: Tensor, needs: Sequence[bool], mode: Lean) -> Any:
        ctx.save_for_backward(grad, input, weight)
        ctx.set_materialize_grads(False)
        ctx.mode, ctx.skips = mode, mode.skips(weight)
        by_weight = mode.nothing(weight) if needs[1] and ctx.skips else None
        if needs[1] and not ctx.skips and not mode.took(weight, _rows(grad).t(), _rows(input)):
            by_weight = _rows(grad).t().mm(_rows(input))
        return grad.matmul(weight) if needs[0] else None, by_weight, _rows(grad).sum(0) if needs[2] else None

    @staticmethod
    def backward(ctx: Any, c: Tensor | None, v: Tensor | None, cb: Tensor | None) -> Any:
        grad, input, weight = ctx.saved_tensors
        by_grad = by_input = by_weight = None
        rows, needs = _rows(grad), ctx.needs_input_grad
        if v is not None:
            by_grad = _rows(input).mm(v.t())
            if ctx.skips:
                ctx.mode.slope += torch.sum(rows * by_grad).item()
            by_input = rows.mm(v).view(input.shape) if needs[1] else None
        if c is not None:
            by_grad = _rows(c).mm(weight.t()) if by_grad is None else torch.addmm(by_grad, _rows(c), weight.t())
            if needs[2] and not ctx.mode.stops(weight) and not ctx.mode.took(weight, rows.t(), _rows(c)):
                by_weight = rows.t().mm(_rows(c))
        if cb is not None:
            by_grad = cb.expand(rows.shape) if by_grad is None else by_grad + cb
        return None if by_grad is None else by_grad.reshape(grad.shape), by_input, by_weight, None, None


def _convolution(n: int) -> Callable[..., Any]:
    """Convolutions over so many dimensions."""

    def made(
        mode: Lean,
        input: Any,
        weight: Any,
        bias: Any = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Any:
        numbers = [(own,) * n if isinstance(own, int) else own for own in (stride, padding, dilation)]
        if any(isinstance(own, str) or len(own) != n for own in numbers) or not isinstance(groups, int):
            return NotImplemented
        if type(input) not in PLAIN or type(weight) not in PLAIN or input.dim() != n + 2:
            return NotImplemented
        work = input.numel() * weight.numel() // max(weight.shape[1], 1)
        if not _worth(input, weight, work, LEAST_CONVOLVED):
            return NotImplemented
        return _Convolution.apply(input, weight, bias, (*numbers, False, (0,) * n, groups), mode)  # type: ignore[no-untyped-call]

    return made


class _Convolution(Function):
    """A convolution."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, how: Any, mode: Lean) -> Tensor:
        ctx.save_for_backward(input, weight)
        ctx.how, ctx.mode = how, mode
        return torch.convolution(input, weight, bias, *how)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        input, weight = ctx.saved_tensors
        return *_ConvolutionBack.apply(grad, input, weight, ctx.needs_input_grad, ctx.how, ctx.mode), None, None  # type: ignore[no-untyped-call]


class _ConvolutionBack(Function):
    """The gradients of a convolution."""

    @staticmethod
    def forward(
        ctx: Any, grad: Tensor, input: Tensor, weight: Tensor, needs: Sequence[bool], how: Any, mode: Lean
    ) -> Any:
        ctx.save_for_backward(grad, input, weight)
        ctx.set_materialize_grads(False)
        ctx.how, ctx.mode, ctx.skips = how, mode, mode.skips(weight)
        mask = (needs[0], needs[1] and not ctx.skips, needs[2])
        by_input, by_weight, by_bias = _back(grad, input, weight, how, *mask)
        return by_input, mode.nothing(weight) if needs[1] and ctx.skips else by_weight, by_bias

    @staticmethod
    def backward(ctx: Any, c: Tensor | None, v: Tensor | None, cb: Tensor | None) -> Any:
        grad, input, weight = ctx.saved_tensors
        by_grad = by_input = by_weight = None
        if v is not None:
            by_grad = torch.convolution(input, v, None, *ctx.how)
            if ctx.skips:
                ctx.mode.slope += torch.sum(grad * by_grad).item()
            by_input = _back(grad, input, v, ctx.how, True, False, False)[0] if ctx.needs_input_grad[1] else None
        if c is not None:
            other = torch.convolution(c, weight, None, *ctx.how)
            by_grad = other if by_grad is None else by_grad + other
            if ctx.needs_input_grad[2] and not ctx.mode.stops(weight):
                by_weight = _back(grad, c, weight, ctx.how, False, True, False)[1]
        if cb is not None:
            cb = cb.view(-1, *(1,) * (grad.dim() - 2))
            by_grad = cb.expand(grad.shape) if by_grad is None else by_grad + cb
        return by_grad, by_input, by_weight, None, None, None


def _back(grad: Tensor, input: Tensor, weight: Tensor, how: Any, *mask: bool) -> Any:
    if not any(mask):
        return None, None, None
    return torch.ops.aten.convolution_backward(grad, input, weight, [weight.shape[0]], *how, mask)


def _rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


LAYERS: dict[Any, Callable[..., Any]] = {
    functional.linear: _linear,
    functional.conv1d: _convolution(1),
    functional.conv2d: _convolution(2),
    functional.conv3d: _convolution(3),
}
