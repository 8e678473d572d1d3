"""A method as a configuration holds it: a call of the package's own constructors, but for what it is made for."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from bisls.parts import identity

Settings = ParamSpec("Settings")
Made = TypeVar("Made", covariant=True)


class Method(Generic[Made]):
    """A constructor and the parts that it is given, without its first argument (the problem, or the parameters).

    Its text is the call. What equals a default is left out, so that one method has one text, and a new option changes none.

    Args:
        make: Such as `BiSLS.paper` or `optim.SPSB`.
        settings: What to set; names that it does not have are refused.

    Examples:
        >>> from bisls import Alternating, BiSLS, Constant, Keep
        >>> Method(BiSLS.paper, alpha=10.0, restart=Keep())
        BiSLS.paper(restart=Keep())
        >>> method = Method(Alternating, lower_step=Constant(0.1)).but(upper_step=Constant(0.01))
        >>> method, method["lower_step"], method["lower_iters"]
        (Alternating(upper_step=Constant(step=0.01), lower_step=Constant(step=0.1)), Constant(step=0.1), None)
    """

    def __init__(
        self, make: Callable[Concatenate[Any, Settings], Made], *args: Settings.args, **settings: Settings.kwargs
    ):
        self.make: Callable[..., Made] = make
        self.name = make.__qualname__
        try:
            bound = signature(make).bind(None, *args, **settings)
        except TypeError as error:
            raise ValueError(f"`Method({self.name}, ...)`: {error}") from None
        (first, *names) = signature(make).parameters.values()
        self._defaults = {one.name: one.default for one in names}
        given = {name: value for name, value in bound.arguments.items() if name != first.name}
        self.settings = {name: own for name, own in given.items() if identity(own) != identity(self._defaults[name])}

    def __call__(self, first: Any, **more: Any) -> Made:
        """Make it."""
        return self.make(first, **self.settings, **more)

    def __getitem__(self, name: str) -> Any:
        """A setting, or its default."""
        return self.settings[name] if name in self.settings else self._defaults[name]

    def but(self, **changes: Any) -> Method[Made]:
        """The same with other settings."""
        return Method(self.make, **{**self.settings, **changes})

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(f'{name}={identity(value)}' for name, value in self.settings.items())})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Method) and repr(self) == repr(other)

    def __hash__(self) -> int:
        return hash(repr(self))
