"""Task: a problem with its data and its exact value. Batches: an endless, resumable sampler."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bisls._check import FLAG, SEED, function, iterable, require_argument, settled, whole_number
from bisls.problem import Bilevel
from bisls.states import Fields, Numbers, Whole, read


class Batches(Iterator[tuple[Tensor, ...]]):
    """An endless iterator of batches of rows, in shuffled epochs without replacement.

    Every epoch is a new permutation of the rows, cut into batches. Rows that do not fill a batch at the end of an epoch are
    left out of it (other rows the next time), so that every batch has the same size and none is drawn twice. The draws come
    from a generator of its own: torch's global one is neither read nor moved.

    Args:
        tensors: Tensors of equally many rows; a batch has the same rows of each.
        batch_size: Rows in a batch, from 1 to the number of rows; over all ranks together.
        seed: What the permutations are drawn from.
        indices: Append the indices of the rows to each batch.
        rank: Which share of each batch this process takes, from 0 to ``world - 1``. All ranks draw the same global batches.
        world: The number of processes that share a batch; it must divide `batch_size`.

    Examples:
        >>> import torch
        >>> rows, labels = torch.tensor([[1.0, 5.0], [2.0, -1.0], [3.0, 0.5], [4.0, 2.0], [5.0, 0.0]]), torch.arange(5)
        >>> batches = Batches((rows, labels), batch_size=2, seed=3)
        >>> first, second = next(batches), next(batches)
        >>> sorted(torch.cat([first[1], second[1]]).tolist())
        [0, 1, 3, 4]
        >>> place = batches.state_dict()
        >>> third = next(batches)
        >>> batches.load_state_dict(place)
        >>> torch.equal(next(batches)[0], third[0])
        True
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        batch_size: int,
        seed: int = 0,
        indices: bool = False,
        rank: int = 0,
        world: int = 1,
    ):
        tensors = () if isinstance(tensors, Tensor) or not iterable(tensors) else tuple(tensors)
        if not tensors or not all(isinstance(tensor, Tensor) for tensor in tensors):
            raise ValueError("`Batches(tensors=...)` must be a tuple of at least one tensor")
        lengths = [len(tensor) if tensor.dim() else 0 for tensor in tensors]
        if len(set(lengths)) > 1:
            raise ValueError(f"`Batches(tensors=...)`: all tensors must have equally many rows, got {lengths}")
        if lengths[0] == 0:
            raise ValueError("`Batches(tensors=...)`: the tensors have no rows")
        rule = f"must be a whole number from 1 to the number of rows, {lengths[0]}"
        batch_size = settled("Batches", "batch_size", batch_size, whole_number(1, rule, most=lengths[0]))
        seed = settled("Batches", "seed", seed, SEED)
        indices = settled("Batches", "indices", indices, FLAG)
        world = settled("Batches", "world", world, whole_number(1))
        rule = f"must divide batch_size={batch_size}, so that every rank takes an equal share"
        require_argument("Batches", "world", world, batch_size % world == 0, rule)
        rule = f"must be a whole number from 0 to world - 1 = {world - 1}"
        rank = settled("Batches", "rank", rank, whole_number(0, rule, most=world - 1))
        self.tensors = tuple(tensors)
        self.batch_size = batch_size
        self.seed = seed
        self.indices = indices
        self.rank = rank
        self.world = world
        self._rows = lengths[0]
        self._generator = torch.Generator().manual_seed(seed)
        self._begin_epoch()

    def _begin_epoch(self) -> None:
        self._order = torch.randperm(self._rows, generator=self._generator)
        self._position = 0
        self._own_order = self._order.to(self.tensors[0].device)

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> tuple[Tensor, ...]:
        if self._position + self.batch_size > self._rows:
            self._begin_epoch()
        share = self.batch_size // self.world
        start = self._position + self.rank * share
        rows = self._own_order[start : start + share]
        self._position += self.batch_size
        batch = tuple(tensor.index_select(0, rows) for tensor in self.tensors)
        return (*batch, rows.clone()) if self.indices else batch

    def state_dict(self) -> dict[str, Any]:
        """The place in the data: tensors and a number, the same on every rank."""
        return {
            "generator": self._generator.get_state(),
            "order": self._order.clone(),
            "position": self._position,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a place that `state_dict` gave, bit for bit.

        Raises:
            ValueError: It is no such place, or one in other data; nothing was loaded.
        """
        call = "`Batches.load_state_dict(...)`"
        order = state.get("order") if isinstance(state, Mapping) else None
        if isinstance(order, Tensor) and order.dim() == 1 and len(order) != self._rows:
            raise ValueError(
                f"{call}: the state is of {len(order)} rows, the data have {self._rows}; it was saved from other data"
            )
        words = Numbers(tuple(self._generator.get_state().shape), (torch.uint8,), device=torch.device("cpu"))
        rows = Numbers((self._rows,), (torch.int64,), device=torch.device("cpu"), wrong=_no_order)
        own = read(call, Fields({"generator": words, "order": rows, "position": Whole(0, self._rows)}), state)
        self._generator.set_state(own["generator"])
        self._order, self._position = own["order"], own["position"]
        self._own_order = self._order.to(self.tensors[0].device)

    def __repr__(self) -> str:
        share = f", rank={self.rank}, world={self.world}" if self.world > 1 else ""
        return f"Batches({self._rows:,} rows, batch_size={self.batch_size:,}, seed={self.seed}{share})"


def _no_order(rows: Tensor) -> str:
    return "" if torch.equal(rows.sort().values, torch.arange(len(rows)).to(rows)) else "is no order of the rows"


class Drawn(Iterator[tuple[Tensor, ...]]):
    """An endless iterator of batches that a function draws, such as new tasks of meta-learning.

    Args:
        make: Called with a `torch.Generator` for every batch; it must draw from nothing else.
        seed: What the generator begins with.

    Examples:
        >>> import torch
        >>> batches = Drawn(lambda rng: (torch.randn(3, generator=rng),), seed=2)
        >>> place = batches.state_dict()
        >>> (first,) = next(batches)
        >>> batches.load_state_dict(place)
        >>> torch.equal(next(batches)[0], first)
        True
    """

    def __init__(self, make: Callable[[torch.Generator], tuple[Tensor, ...]], seed: int = 0):
        rule = "must be a callable that takes a torch.Generator and returns a tuple of tensors"
        self.make = settled("Drawn", "make", make, function(1, rule))
        self.seed = settled("Drawn", "seed", seed, SEED)
        self._generator = torch.Generator().manual_seed(self.seed)

    def __iter__(self) -> Drawn:
        return self

    def __next__(self) -> tuple[Tensor, ...]:
        return self.make(self._generator)

    def state_dict(self) -> dict[str, Any]:
        """The place: the state of the generator."""
        return {"generator": self._generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a place that `state_dict` gave, bit for bit.

        Raises:
            ValueError: It is no such place; nothing was loaded.
        """
        words = Numbers(tuple(self._generator.get_state().shape), (torch.uint8,), device=torch.device("cpu"))
        own = read("`Drawn.load_state_dict(...)`", Fields({"generator": words}), state)
        self._generator.set_state(own["generator"])

    def __repr__(self) -> str:
        return f"Drawn(seed={self.seed})"


Data = tuple[Tensor, ...] | Batches | Drawn
"""A tuple of tensors is one batch for every step (deterministic), a `Batches` or a `Drawn` a new batch for each (stochastic)."""


@dataclass(frozen=True)
class Task:
    """A bi-level problem that is ready to run.

    Attributes:
        name: What it is called.
        problem: The two losses and their parameters, at their start.
        upper_data: The batches of the upper loss: a tuple of tensors (one batch for every step), a `Batches` or a `Drawn`.
        lower_data: The same for the lower loss; None where the lower loss is called with the upper batch.
        lower_iters: The number of lower steps an outer iteration that suits it.
        exact: ``F(x) = f(x, y*(x))`` at the present x, on all data, with the lower problem solved tightly in float64. It leaves
            no trace: parameters and random state stay as they are. The present y is only where the solver starts from. A lower
            problem that cannot be solved (x is not finite) gives nan; one that is not solved tightly also warns. Where y is a
            network there is no such value: there it is the loss on data that neither level has seen, at the present x and y.
        metrics: Other measures at the present point, such as the accuracy on data that neither level has seen; may be empty.
        retrained: What `exact` would be with y trained from its start at the present x, by plain Adam for a fixed number of steps
            on batches of its own. While both levels are trained y may learn more of the upper loss than x holds; what x is
            worth by itself shows here. It leaves no trace either. None where `exact` solves for y, or y begins anew anyway.
    """

    name: str
    problem: Bilevel
    upper_data: Data
    lower_data: Data | None
    lower_iters: int
    exact: Callable[[], float]
    metrics: Callable[[], dict[str, float]]
    retrained: Callable[[], float] | None = None

    def __repr__(self) -> str:
        return f"Task({self.name}: {self.problem!r}, lower_iters={self.lower_iters})"


def data(
    call: str, tensors: tuple[Tensor, ...], name: str, batch_size: int | None, seed: int, rows: bool = False
) -> Data:
    """The tensors as they stand where `batch_size` is None, and a sampler over them otherwise; `rows` adds row indices."""
    if batch_size is None:
        return (*tensors, torch.arange(len(tensors[0]), device=tensors[0].device)) if rows else tensors
    rule = f"must be None (all rows at every step) or a whole number from 1 to the number of rows, {len(tensors[0])}"
    batch_size = settled(call, name, batch_size, whole_number(1, rule, most=len(tensors[0])))
    return Batches(tensors, batch_size, seed, indices=rows)


def streams(call: str, seed: int, count: int) -> list[torch.Generator]:
    """Independent generators from one seed, so that the split, the start and both samplers do not move together."""
    seed = settled(call, "seed", seed, SEED)
    seeds = torch.randint(2**62, (count,), generator=torch.Generator().manual_seed(seed))
    return [torch.Generator().manual_seed(int(own)) for own in seeds]
