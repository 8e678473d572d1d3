"""Who else is running: the processes of `torch.distributed`, and what they agree on. One process where it is not initialised.

Whatever the ranks exchange begins with a *roll call*, on a line of its own: each says what it is about to do, or what it raised,
and hears the same of all others. So nobody waits for a rank that has failed, and ranks that have got out of step are told so
before they mix their numbers up. Small things (flags, a loss, short vectors) are exchanged by the roll call itself.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial, wraps
from itertools import count
from time import monotonic
from typing import Any, ParamSpec, TypeVar
from weakref import WeakKeyDictionary
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

_THERE = dist.is_available()
if _THERE:
    from torch._C._distributed_c10d import AllgatherOptions
P = ParamSpec("P")
R = TypeVar("R")

# what a rank says: whether it has failed, how deep it is in calls, how much of the room is used, a length, and what it is about
HEAD = struct.Struct("<BBHxxxxQ48s")
ROOM = 448  # bytes that go along
PATIENCE, LONGEST = 10.0, 60.0  # seconds that a rank that has failed waits for the others to come and hear of it


class RankError(RuntimeError):
    """Another rank has failed, has gone, or does something else: the message says which one, and what it raised.

    Attributes:
        raised: What each rank that failed has raised, by its number; empty where that is not known.
    """

    def __init__(self, text: str, raised: dict[int, str] | None = None):
        super().__init__(text)
        self.raised = raised or {}


def world() -> int:
    """The number of processes; 1 without `torch.distributed`."""
    return dist.get_world_size() if _THERE and dist.is_initialized() else 1


def rank() -> int:
    """The number of this process; 0 without `torch.distributed`."""
    return dist.get_rank() if world() > 1 else 0


def together(function: Callable[P, R]) -> Callable[P, R]:
    """Make a function end alike on every rank: all return, or all raise.

    A rank on which it raises, whatever that is, raises it; the others raise a `RankError` that says which rank raised what.
    """
    label = f"end of {function.__qualname__}"

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if world() == 1:
            return function(*args, **kwargs)
        _line()  # while all come here
        level = _Level()
        _levels.append(level)
        try:
            result = function(*args, **kwargs)
            _roll(label)
            return result
        except BaseException as error:
            if level.error is None:
                _announce(error)
            raise
        finally:
            _levels.pop()

    return call


def mean_over_ranks(tensor: Tensor) -> Tensor:
    """The mean over the processes, the same on each; the tensor itself where there is one process."""
    if world() > 1:
        (mean,) = means_over_ranks([tensor])
        assert mean is not None
        return mean
    return tensor


def means_over_ranks(tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    """The mean of each tensor; where it is None on some ranks, it counts as zero there, and None is left where it is on all."""
    if world() == 1:
        return list(tensors)
    own = [tensor.detach() for tensor in tensors if tensor is not None]
    kinds = [None if tensor is None else (tensor.dtype, tuple(tensor.shape)) for tensor in tensors]
    label = f"mean of {sum(tensor.numel() for tensor in own)} numbers ({crc32(repr(kinds).encode()):x})"
    small = sum(tensor.nbytes for tensor in own) <= ROOM and all(tensor.device.type == "cpu" for tensor in own)
    said = _roll(label, b"".join(map(_bytes, own)) if small else b"", alike=False)
    if any(one.label != label for one in said):
        return means_over_ranks(_filled(tensors, from_all_ranks(kinds), said))
    means = _means([one.data for one in said], own) if small else [_reduced(tensor) for tensor in own]
    rest = iter(means)
    return [None if tensor is None else next(rest) for tensor in tensors]


def on_any_rank(*flags: bool) -> list[bool]:
    """Which flags are up on any rank: what differs from rank to rank must be decided together."""
    if world() == 1:
        return list(flags)
    said = _roll(f"{len(flags)} flags", bytes(flags))
    return [any(row) for row in zip(*(one.data for one in said), strict=True)]


def from_all_ranks(value: Any) -> list[Any]:
    """What each rank gave, on every rank; also a barrier."""
    if world() == 1:
        return [value]
    data = pickle.dumps(value)
    said = _roll("what each rank has", data[:ROOM], len(data))
    most = max(one.length for one in said)
    if most > ROOM:  # what does not go along is sent after it
        rows = _gather(data.ljust(most, b"\0"))
        return [pickle.loads(row[: one.length]) for row, one in zip(rows, said, strict=True)]
    return [pickle.loads(one.data) for one in said]


def hear() -> None:
    """Raise what another rank has raised, as a `RankError`; go on where none has."""
    if world() > 1:
        _roll("how the others are")


def draw(n: int) -> int:
    """A whole number uniform on 0 .. n - 1 from torch's generator, the same on every rank."""
    number = int(torch.randint(n, (1,)))
    return number if world() == 1 else _roll(f"draw below {n}", length=number)[0].length


def broadcast_(tensors: Sequence[Tensor]) -> None:
    """Write rank 0's numbers into tensors that have the same shapes and dtypes on every rank."""
    _roll(f"broadcast of {len(tensors)} tensors")
    with torch.no_grad():
        for tensor in tensors:
            own = tensor.detach().clone(memory_format=torch.contiguous_format)
            _reached(partial(dist.broadcast, own, src=0))
            tensor.copy_(own)


def meeting() -> int:
    """Which group of processes this is: another number after another `init_process_group`; 0 for one process alone."""
    return 0 if world() == 1 else _line()[1]


def sharded(tensor: Tensor) -> str:
    """What has cut a parameter into shards, of which each rank holds one; empty where it is whole."""
    kinds = type(tensor).__mro__
    if any(kind.__name__ == "DTensor" and kind.__module__.startswith("torch.distributed") for kind in kinds):
        return "a DTensor (fully_shard of FSDP2, or tensor parallelism)"
    if getattr(tensor, "_is_flat_param", False) or getattr(tensor, "_fsdp_flattened", False):
        return "a shard of FullyShardedDataParallel"
    return ""


WHOLE = (
    "each rank holds a part of it, and the numbers of all ranks are needed on each; leave the model whole on every rank (as "
    "DistributedDataParallel does), since losses and gradients are averaged over the ranks here"
)


# --- the roll call


class _Level:
    """A call of a function that is made `together`, and what has ended it for all ranks."""

    error: RankError | None = None


@dataclass(frozen=True)
class _Said:
    failed: bool
    depth: int
    label: str
    length: int
    data: bytes


_levels: list[_Level] = []
_lines: WeakKeyDictionary[Any, tuple[Any, int]] = WeakKeyDictionary()  # by the group of all ranks
_numbers = count(1)
_times = {"last": 0.0, "longest": 0.0}  # between two roll calls


def _roll(label: str, data: bytes = b"", length: int = 0, alike: bool = True) -> list[_Said]:
    """Say what this rank is about to do, and hear what the others are.

    Args:
        label: What it is; the first word says which kind of exchange.
        data: What goes along.
        length: A number that goes along.
        alike: Whether the labels must be the same; otherwise their first words.

    Raises:
        RankError: One of them has failed, or is about something else.
    """
    if _levels and _levels[-1].error is not None:  # somebody has caught it, and goes on alone
        raise _levels[-1].error
    said = _exchange(False, label, data, length)
    error = _failure(said)
    if error is not None:
        raise error
    if any(one.label != label and (alike or one.label.split()[0] != label.split()[0]) for one in said):
        raise _out_of_step(said)
    return said


def _out_of_step(said: Sequence[_Said]) -> RankError:
    ranks = "; ".join(f"rank {i}: {one.label}" for i, one in enumerate(said))
    return RankError(
        f"the ranks are out of step ({ranks}). Every rank must make the same calls, as many of them, with the same settings, on "
        "data of the same kind"
    )


def _filled(tensors: Sequence[Tensor | None], kinds: Sequence[Any], said: Sequence[_Said]) -> list[Tensor | None]:
    """Zeros where other ranks have a tensor and this one has none."""
    filled: list[Tensor | None] = []
    device = next((tensor.device for tensor in tensors if tensor is not None), _device())
    for i, tensor in enumerate(tensors):
        known = {own[i] for own in kinds if len(own) == len(tensors)} - {None}
        if len(known) > 1 or any(len(own) != len(tensors) for own in kinds):
            raise _out_of_step(said)
        for dtype, shape in known:
            filled.append(torch.zeros(shape, dtype=dtype, device=device) if tensor is None else tensor)
        filled.extend([None] if not known else [])
    return filled


def _announce(error: BaseException) -> None:
    """Tell the others that this rank has failed, where they come to hear of it."""
    try:
        what = str(error).partition("\n")[0]
    except Exception:  # an error that cannot be printed is told by its type
        what = ""
    text = f"{type(error).__name__}: {what}" if what else type(error).__name__
    patience = min(PATIENCE + 2 * _times["longest"], LONGEST)
    try:
        _failure(_exchange(True, "error", text.encode()[:ROOM], 0, patience))
    except RankError:
        error.add_note("the other ranks could not be told: they have ended, or wait for something else than bisls")


def _failure(said: Sequence[_Said]) -> RankError | None:
    """What has failed on any rank; then the calls from there inwards are over for all."""
    raised = {i: one.data.decode(errors="ignore") for i, one in enumerate(said) if one.failed}
    if not raised:
        return None
    text = "; ".join(f"rank {i} raised {what}" for i, what in raised.items())
    error = RankError(f"{text}. The traceback is in the output of that rank", raised)
    for level in _levels[max(min(one.depth for one in said if one.failed), 1) - 1 :]:
        level.error = error
    return error


def _exchange(failed: bool, label: str, data: bytes, length: int, patience: float | None = None) -> list[_Said]:
    """One roll call; who has failed waits only for so long."""
    began = monotonic()
    if _times["last"]:
        _times["longest"] = max(_times["longest"], began - _times["last"])
    head = HEAD.pack(failed, min(len(_levels), 255), len(data), length, label.encode()[:48])
    rows = _gather((head + data).ljust(HEAD.size + ROOM, b"\0"), patience)
    _times["last"] = monotonic()
    found = []
    for row in rows:
        state, depth, used, own, name = HEAD.unpack_from(row)
        text = name.rstrip(b"\0").decode(errors="ignore")
        found.append(_Said(bool(state), depth, text, own, row[HEAD.size : HEAD.size + used]))
    return found


def _gather(data: bytes, patience: float | None = None) -> list[bytes]:
    """What each rank gave: as many bytes on each."""
    line, _ = _line()
    device = torch.device("cpu") if line is not dist.group.WORLD else _device()
    own = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
    rows = list(torch.empty(world(), len(data), dtype=torch.uint8, device=device).unbind(0))

    def send() -> None:
        if patience is None:
            dist.all_gather(rows, own, group=line)
            return
        options = AllgatherOptions()
        options.timeout = timedelta(seconds=patience)
        line.allgather([rows], [own], options).wait()

    _reached(send)
    return [row.cpu().numpy().tobytes() for row in rows]


def _reached(send: Callable[[], Any]) -> None:
    """Make a call to all other ranks; where one cannot be reached, none of the calls that are under way can go on."""
    try:
        send()
    except RuntimeError as broken:
        if dist.is_initialized():
            _lines.pop(dist.group.WORLD, None)  # it is of no use any more; all ranks make another one
        error = RankError(
            "another rank has ended, or cannot be reached; look into its output for what it raised, and whether all ranks make "
            f"the same number of steps ({str(broken).partition(chr(10))[0]})"
        )
        for level in _levels:
            level.error = error
        raise error from broken


def _line() -> tuple[Any, int]:
    """The group in which roll calls are made, and its number. A loss may use the group of all ranks for its own ends."""
    everyone = dist.group.WORLD
    found = _lines.get(everyone)
    if found is None:
        backend = str(dist.get_backend())
        # who has gone is noticed here; to make a group would wait for it
        _reached(lambda: dist.all_reduce(torch.zeros(1, device=_device())))
        line = everyone
        if backend in ("gloo", "nccl") and dist.is_gloo_available():
            line = dist.new_group(backend="gloo", timeout=_timeout())
        found = _lines[everyone] = (line, next(_numbers))
    return found


def _timeout() -> timedelta | None:
    """How long the group of all ranks waits; None where it does not say."""
    try:
        everyone: Any = dist.group.WORLD
        own = everyone._get_backend(_device()).options._timeout
    except (AttributeError, RuntimeError):
        return None
    return own if isinstance(own, timedelta) else None


def _bytes(tensor: Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def _means(rows: Sequence[bytes], like: Sequence[Tensor]) -> list[Tensor]:
    """The means of tensors that each rank has sent as bytes; summed in the order of the ranks."""
    means, begin = [], 0
    for tensor in like:
        end = begin + tensor.nbytes
        mean = torch.zeros_like(tensor, memory_format=torch.contiguous_format).reshape(-1)
        for i, row in enumerate(rows if end > begin else ()):
            part = torch.frombuffer(bytearray(row[begin:end]), dtype=tensor.dtype)
            mean = mean + part if i else part
        means.append((mean / len(rows)).view(tensor.shape))
        begin = end
    return means


def _reduced(tensor: Tensor) -> Tensor:
    """The mean of a tensor by `all_reduce`."""
    mean = tensor.clone(memory_format=torch.contiguous_format)
    _reached(lambda: dist.all_reduce(mean))
    mean /= world()
    return mean


def _device() -> torch.device:
    """Where the backend moves tensors."""
    return torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
