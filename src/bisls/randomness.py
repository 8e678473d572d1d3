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
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": packed(np.random.get_state(legacy=False)),  # noqa: NPY002 - it is the users' global generator
        "python": packed(random.getstate()),
        "cuda": [],
    }
    if torch.cuda.is_available():  # pragma: no cover - no accelerator in the tests
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def set_random_state(state: Mapping[str, Any]) -> None:
    """Put the global generators back to a state that `random_state` gave."""
    torch.set_rng_state(state["torch"].cpu())
    np.random.set_state(unpacked(state["numpy"]))  # noqa: NPY002
    random.setstate(unpacked(state["python"]))
    for device, own in enumerate(state["cuda"][: torch.cuda.device_count()]):  # pragma: no cover
        torch.cuda.set_rng_state(own.cpu(), device)


def random_kind() -> Kind:
    """What a state may be that `set_random_state` is given: like the present one, and such that the generators can go on."""
    now = random_state()
    return Fields(
        {
            "torch": packed_kind(now["torch"]),
            "numpy": packed_kind(now["numpy"]),
            "python": packed_kind(now["python"]),
            "cuda": Each(Numbers((None,), (torch.uint8,))),
        }
    )


def packed_kind(now: Any, name: str = "") -> Kind:
    """What a state may be, as `packed` gives it, that a generator is put back to: like its present one.

    Args:
        now: The present one, or a part of it.
        name: What the part is called.
    """
    if isinstance(now, torch.Tensor):
        return Numbers(tuple(now.shape), (torch.uint8,))
    if isinstance(now, list):  # Python's
        words = Numbers(tuple(now[1].shape), (torch.int64,), least=0, most=WORD, wrong=_drained)
        return Each([Choice((now[0],)), words, Maybe(Number())])
    if isinstance(now, Mapping) and set(now) == {"array", "dtype"}:
        array, limits = now["array"], np.iinfo(now["dtype"])
        twister = name == "key" and array.numel() == 624
        least = np.iinfo(np.int64).min if limits.bits == 64 else limits.min  # words of 64 bits are kept with a sign
        shape, most = tuple(array.shape), float(limits.max)
        fits = Numbers(shape, (array.dtype,), least=least, most=most, wrong=_drained if twister else None)
        return Fields({"array": fits, "dtype": Choice((now["dtype"],))})
    if isinstance(now, Mapping):
        own = {part: packed_kind(entry, part) for part, entry in now.items()}
        if "pos" in own:  # beyond its words the generator would read what is not its own
            own["pos"] = Whole(0, len(now["key"]["array"]))
        return Fields(own)
    if isinstance(now, str):
        return Choice((now,))
    return Number() if isinstance(now, float) else Whole(0, _MOST.get(name, 2**128 - 1))


_MOST = {"has_uint32": 1, "has_gauss": 1, "uinteger": WORD, "buffer_pos": 4}  # what the other numbers of a state may be


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


def packed(state: Any) -> Any:
    """What `state_of` gave, as tensors and plain values, so that a checkpoint can be read without trusting it."""
    if isinstance(state, np.ndarray):
        return {"array": torch.from_numpy(state.astype(np.int64)), "dtype": str(state.dtype)}
    if isinstance(state, tuple):  # Python's: a version, words, and a number or None
        return [state[0], torch.from_numpy(np.array(state[1])), state[2]]
    return {name: packed(entry) for name, entry in state.items()} if isinstance(state, dict) else state


def unpacked(state: Any) -> Any:
    """What `put_back` takes, from what `packed` gave."""
    if isinstance(state, torch.Tensor):
        return state.cpu()
    if isinstance(state, list | tuple):
        return state[0], tuple(state[1].tolist()), state[2]
    if not isinstance(state, Mapping):
        return state
    if set(state) == {"array", "dtype"}:
        return state["array"].cpu().numpy().astype(state["dtype"])
    return {name: unpacked(entry) for name, entry in state.items()}
