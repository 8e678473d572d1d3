"""Random generators of torch, NumPy and Python, the global ones and those of users: read, compared, put back, seeded."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from bisls.states import Choice, Each, Fields, Kind, Maybe, Number, Numbers, Whole

WORD = 2**32 - 1  # the largest of the words that the states of generators are made of


def random_state() -> dict[str, Any]:
    """The state of the global generators of torch (every CUDA device too), numpy and Python, as tensors and plain values."""
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": _freeze(np.random.get_state(legacy=False)),  # noqa: NPY002 - it is the users' global generator
        "python": [version, torch.from_numpy(np.array(words)), gauss],
        "cuda": [],
    }
    if torch.cuda.is_available():  # pragma: no cover - no accelerator in the tests
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def set_random_state(state: Mapping[str, Any]) -> None:
    """Put the global generators back to a state that `random_state` gave."""
    torch.set_rng_state(state["torch"].cpu())
    np.random.set_state(_thaw(state["numpy"]))  # noqa: NPY002
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    for device, own in enumerate(state["cuda"][: torch.cuda.device_count()]):  # pragma: no cover
        torch.cuda.set_rng_state(own.cpu(), device)


def random_kind() -> Kind:
    """What a state may be that `set_random_state` is given: like the present one, and such that the generators can go on."""
    now = random_state()
    states = Numbers(tuple(now["torch"].shape), (torch.uint8,))
    words = Numbers(tuple(now["python"][1].shape), (torch.int64,), least=0, most=WORD, wrong=_drained)
    version = Choice((now["python"][0],))
    return Fields(
        {
            "torch": states,
            "numpy": _like(now["numpy"]),
            "python": Each([version, words, Maybe(Number())]),
            "cuda": Each(Numbers((None,), (torch.uint8,))),
        }
    )


def _like(now: Any) -> Kind:
    """What may stand in place of a part of NumPy's state."""
    if isinstance(now, Mapping) and set(now) == {"array", "dtype"}:
        array, most = now["array"], np.iinfo(now["dtype"]).max
        fits = Numbers(tuple(array.shape), (array.dtype,), least=0, most=float(most), wrong=_drained)
        return Fields({"array": fits, "dtype": Choice((now["dtype"],))})
    if isinstance(now, Mapping):
        own = {name: _like(entry) for name, entry in now.items()}
        if "pos" in own:  # beyond its words the generator would read what is not its own
            own["pos"] = Whole(0, len(now["key"]["array"]))
        return Fields(own)
    if isinstance(now, str):
        return Choice((now,))
    return Number() if isinstance(now, float) else Whole(0, 2**128)


def _drained(words: torch.Tensor) -> str:
    return "" if bool(words[:624].any()) else "is zero throughout, from where nothing random comes"


def seed_everything(seed: int) -> None:
    """Seed the global generators of torch, numpy and Python."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002
    random.seed(seed)


def state_of(generator: Any) -> Any:
    """The state of a generator of torch, NumPy or Python, as it gives it."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.get_state(legacy=False) if isinstance(generator, np.random.RandomState) else generator.getstate()


def put_back(generator: Any, state: Any) -> None:
    """Make a generator go on from a state that `state_of` gave."""
    if isinstance(generator, torch.Generator | np.random.RandomState):
        generator.set_state(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    else:
        generator.setstate(state)


def same_state(one: Any, two: Any) -> bool:
    """Whether two states are equal, so that nothing was drawn in between."""
    if isinstance(one, Mapping):
        return one.keys() == two.keys() and all(same_state(one[name], two[name]) for name in one)
    if isinstance(one, torch.Tensor):
        return torch.equal(one, two)
    return np.array_equal(one, two) if isinstance(one, np.ndarray) else bool(one == two)


def _freeze(value: Any) -> Any:
    """Arrays as tensors, so that a checkpoint can be read without trusting it."""
    if isinstance(value, np.ndarray):
        return {"array": torch.from_numpy(value.astype(np.int64)), "dtype": str(value.dtype)}
    return {name: _freeze(entry) for name, entry in value.items()} if isinstance(value, dict) else value


def _thaw(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    if set(value) == {"array", "dtype"}:
        return value["array"].numpy().astype(value["dtype"])
    return {name: _thaw(entry) for name, entry in value.items()}
