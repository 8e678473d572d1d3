"""A run that was cut goes on as if it had not been: whatever losses and data draw from, whatever batches are made of."""

from __future__ import annotations

import random
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import bisls
from bisls.batches import filled, kept, same
from bisls.checkpoint import CheckpointError

pytestmark = pytest.mark.slow  # `make quick` leaves it out

ROWS = torch.randn(20, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
LABELS = ROWS.sum(1) + torch.randn(20, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
GAPS = LABELS.clone()
GAPS[3] = float("nan")


class Numbered:
    """Batches that are put together by a function of the rows; it saves its place."""

    def __init__(self, pack, rows=lambda i: torch.arange(i % 3, 20, 3)):
        self.i, self.pack, self.rows = 0, pack, rows

    def __call__(self):
        self.i += 1
        own = self.rows(self.i)
        return self.pack(ROWS[own].clone(), LABELS[own].clone())

    def state_dict(self):
        return {"i": self.i}

    def load_state_dict(self, state):
        self.i = state["i"]


def pair(features, labels):
    return features, labels


class Made:
    """A run, all of it new: a regression with a penalty a feature, on upper batches of any kind."""

    def __init__(self, upper=None, lower=None, opened=tuple, noise=lambda: 0.0):
        torch.manual_seed(0)
        np.random.seed(0)  # noqa: NPY002
        random.seed(0)
        x = torch.zeros(3, dtype=torch.float64, requires_grad=True)
        y = torch.full((3,), 0.1, dtype=torch.float64, requires_grad=True)
        self.upper, self.lower = upper or Numbered(pair), lower or (ROWS, LABELS)

        def loss(batch):
            features, labels = batch
            there = ~labels.isnan()
            return ((features @ y - labels)[there] ** 2).mean() + 0.01 * noise() * y.sum()

        def above(batch):
            return loss(opened(batch))

        self.problem = bisls.Bilevel(above, lambda batch: loss(batch) + (x.exp() * y**2).sum(), [x], [y])
        self.solver = bisls.BiSLS(self.problem, lower_iters=2)

    def fit(self, steps, path=None):
        history = bisls.fit(
            self.solver, self.upper, self.lower, steps, False, checkpoint=path, resume=path is not None, tol=None
        )
        return [record.to_dict() for record in history], self.problem.x.read().tolist(), self.problem.y.read().tolist()


def goes_on(make, path, cuts=(3, 5), steps=8):
    """Whether the run that is cut there is the whole run, bit for bit."""
    whole = make().fit(steps)
    for cut in (*cuts, steps):
        last = make().fit(cut, path)
        torch.manual_seed(99)
        np.random.seed(99)  # noqa: NPY002
        random.seed(99)
    return repr(last) == repr(whole)


# --- random generators


def drawing(kind):
    """A function that draws from a generator of its own."""
    if kind == "torch":
        own = torch.Generator().manual_seed(3)
        return lambda: float(torch.randn((), generator=own))
    if kind == "Random":
        own = random.Random(3)
        return lambda: own.gauss(0, 1)
    if kind == "RandomState":
        own = np.random.RandomState(3)
        return lambda: own.randn()
    own = np.random.Generator(getattr(np.random, kind)(3))
    return lambda: own.normal()


KINDS = ["torch", "Random", "RandomState", "PCG64", "PCG64DXSM", "Philox", "SFC64", "MT19937"]


@pytest.mark.parametrize("kind", KINDS)
def test_generators_of_the_losses_are_in_the_checkpoint(kind, tmp_path):
    assert goes_on(lambda: Made(noise=drawing(kind)), tmp_path / "run.pt")


def test_generators_that_are_others_than_then_are_said(tmp_path, caplog):
    Made(noise=drawing("PCG64")).fit(3, tmp_path / "run.pt")
    caplog.clear()
    Made(noise=drawing("Philox")).fit(4, tmp_path / "run.pt")
    said = "the losses: the random generators in reach were numpy.random.Generator of PCG64 when the run was saved, and are "
    assert f"{said}numpy.random.Generator of Philox; they stay as they are" in caplog.text
    caplog.clear()
    Made().fit(5, tmp_path / "run.pt")
    assert "and are none; they stay as they are" in caplog.text


def forged(path, name, change):
    content = torch.load(path, weights_only=True)
    change(content["ranks"][0][name])
    torch.save(content, path)


def test_a_forged_state_of_a_generator_is_refused_and_nothing_is_changed(tmp_path):
    path = tmp_path / "run.pt"
    for kind, place, value in (
        ("PCG64", "uinteger", 2**40),
        ("PCG64", "state", {}),
        ("Philox", "buffer_pos", 9),
        ("MT19937", "state", {"key": 3, "pos": 0}),
    ):
        Made(noise=drawing(kind)).fit(2, path)

        def change(saved, place=place, value=value):
            saved[0]["state"][place] = value

        forged(path, "generators", change)
        noise = drawing(kind)
        with pytest.raises(CheckpointError, match=rf"generators\[0\]\['state'\]\['{place}'\]"):
            Made(noise=noise).fit(4, path)
        assert noise() == drawing(kind)()
        path.unlink()


def test_a_checkpoint_from_before_generators_were_kept_can_be_resumed(tmp_path, caplog):
    path, noise = tmp_path / "run.pt", drawing("PCG64")
    Made(lower=DataLoader(Noisy(drawing("PCG64")), 7), noise=noise).fit(3, path)
    content = torch.load(path, weights_only=True)
    part = content["ranks"][0]
    del part["generators"], part["feeds"]["lower"]["others"], part["feeds"]["lower"]["start"]["others"]
    torch.save(content, path)
    assert len(Made(lower=DataLoader(Noisy(drawing("PCG64")), 7), noise=drawing("PCG64")).fit(5, path)[0]) == 5
    assert "the losses: the random generators in reach were none when the run was saved" in caplog.text


class Noisy(Dataset):
    """Rows with noise from a generator of its own."""

    def __init__(self, draw):
        self.draw = draw

    def __len__(self):
        return 20

    def __getitem__(self, i):
        return ROWS[i] + 0.1 * self.draw(), LABELS[i]


class Shuffled:
    """A loader of the user's own, with an order from a generator of its own."""

    def __init__(self):
        self.rng = np.random.default_rng(4)

    def __iter__(self):
        for rows in torch.from_numpy(self.rng.permutation(18)).reshape(3, 6):
            yield ROWS[rows], LABELS[rows]


def picking():
    rng = np.random.default_rng(4)

    def draw():
        rows = torch.from_numpy(rng.integers(20, size=6))
        return ROWS[rows], LABELS[rows]

    return draw


DATA = {
    "a callable": picking,
    "a loader of the user's own": Shuffled,
    "a DataLoader": lambda: DataLoader(Noisy(drawing("PCG64")), 7, shuffle=True),
    "a DataLoader, torch": lambda: DataLoader(Noisy(drawing("torch")), 7, shuffle=True),
}


@pytest.mark.parametrize("level", ["upper", "lower"])
@pytest.mark.parametrize("what", DATA)
def test_generators_of_the_data_are_in_the_checkpoint(what, level, tmp_path):
    assert goes_on(lambda: Made(**{level: DATA[what]()}), tmp_path / "run.pt")


def test_one_generator_for_both_levels_and_the_loss(tmp_path):
    def make():
        draw = drawing("PCG64")
        return Made(DataLoader(Noisy(draw), 7, shuffle=True), DataLoader(Noisy(draw), 6, shuffle=True), noise=draw)

    assert goes_on(make, tmp_path / "run.pt")


# --- what batches are made of


@dataclass
class Counted:
    features: object
    labels: object
    n: int = field(init=False, default=0)

    def __post_init__(self):
        self.n = len(self.labels)
        self.features = self.features * 2


@dataclass(frozen=True, slots=True)
class Frozen:
    features: object
    labels: object


class FrozenMap(Mapping):
    def __init__(self, content):
        self.content = content

    def __getitem__(self, key):
        return self.content[key]

    def __iter__(self):
        return iter(self.content)

    def __len__(self):
        return len(self.content)


class Changeable(FrozenMap, MutableMapping):
    def __setitem__(self, key, value):
        self.content[key] = value

    def __delitem__(self, key):
        del self.content[key]


class Attributes(dict):
    __getattr__ = dict.__getitem__  # it raises a KeyError for every name that it does not have


def by_name(batch):
    return batch["f"], batch["t"]


def first_two(batch):
    return batch[:2]


def fields_of(batch):
    return batch.features, batch.labels


BATCHES = {
    "dataclass with a field of its own": (Counted, fields_of),
    "frozen dataclass": (Frozen, fields_of),
    "MappingProxyType": (lambda f, t: types.MappingProxyType({"f": f, "t": t}), by_name),
    "Mapping without update": (lambda f, t: FrozenMap({"f": f, "t": t}), by_name),
    "MutableMapping": (lambda f, t: Changeable({"f": f, "t": t}), by_name),
    "defaultdict": (lambda f, t: defaultdict(list, f=f, t=t), by_name),
    "dict with attributes": (lambda f, t: Attributes(f=f, t=t), by_name),
    "OrderedDict": (lambda f, t: OrderedDict(f=f, t=t), by_name),
    "text in an array": (lambda f, t: (f, t, np.array(["u", "vw"])), first_two),
    "dates in an array": (lambda f, t: (f, t, np.array(["2020-01-01", "NaT"], dtype="M8[s]")), first_two),
    "complex array": (lambda f, t: (f, t, np.ones(2) * 1j), first_two),
    "bytes": (lambda f, t: (f, t, b"name"), first_two),
    "complex": (lambda f, t: (f, t, 1j), first_two),
    "set": (lambda f, t: (f, t, {1, 2}, frozenset("ab")), first_two),
    "Size, slice and range": (lambda f, t: (f, t, f.shape, slice(0, 2), range(3)), first_two),
    "dtype and device": (lambda f, t: (f, t, torch.float64, torch.device("cpu")), first_two),
}


@pytest.mark.parametrize("what", BATCHES)
def test_the_last_batch_is_kept_whatever_it_is_made_of(what, tmp_path, caplog):
    pack, opened = BATCHES[what]
    assert goes_on(lambda: Made(Numbered(pack), opened=opened), tmp_path / "run.pt")
    assert "can't be saved" not in caplog.text


@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize("arrays", [True, False])
def test_labels_that_are_missing_do_not_make_another_batch(arrays, fresh, tmp_path):
    """NaN is no number and equals nothing; the batch that holds it is the same all the same."""

    def pack(features, labels):
        own = (ROWS.clone(), GAPS.clone()) if fresh else (ROWS, GAPS)
        return (own[0].numpy(), own[1].numpy()) if arrays else own

    def opened(batch):
        return tuple(map(torch.as_tensor, batch))

    assert goes_on(lambda: Made(Numbered(pack), opened=opened), tmp_path / "run.pt")


def test_batches_are_compared_by_their_bits():
    nan = float("nan")
    for one, two in (
        (torch.tensor([1.0, nan]), torch.tensor([1.0, nan])),
        (np.array([1.0, nan]), np.array([1.0, nan])),
        (float("nan"), float("nan")),
        (np.float64("nan"), np.float64("nan")),
        (torch.tensor([nan * 1j]), torch.tensor([nan * 1j])),
        (np.array(["NaT"], dtype="M8[s]"), np.array(["NaT"], dtype="M8[s]")),
    ):
        assert same((one, 1), (two, 1))
    for one, two in (
        (torch.tensor([1.0, nan]), torch.tensor([nan, 1.0])),
        (torch.tensor([1.0, nan]), torch.tensor([2.0, nan])),
        (np.array([1.0, nan]), np.array([2.0, nan])),
        (nan, 1.0),
        (np.array(["a"]), np.array(["b"])),
    ):
        assert not same((one, 1), (two, 1))


def test_a_container_is_filled_without_a_change_to_its_pattern():
    class Shared(Mapping):
        """Keeps its entries where a copy has them too."""

        __slots__ = ("content",)
        __init__, __getitem__ = FrozenMap.__init__, FrozenMap.__getitem__
        __iter__, __len__ = FrozenMap.__iter__, FrozenMap.__len__

        def update(self, entries):
            self.content.update(entries)

    for like in (Shared({"f": 1, "t": 2}), Changeable({"f": 1, "t": 2}), FrozenMap({"f": 1, "t": 2})):
        made = filled(like, [3, 4])
        assert type(made) is type(like)
        assert (dict(made), dict(like)) == ({"f": 3, "t": 4}, {"f": 1, "t": 2})


class Tagged(torch.Tensor):
    """A tensor of a kind of its own."""


UNKEPT = {
    "sparse": (lambda f, t: (f.to_sparse(), t), lambda b: (b[0].to_dense(), b[1])),
    "CSR": (lambda f, t: (f.to_sparse_csr(), t), lambda b: (b[0].to_dense(), b[1])),
    "quantized": (
        lambda f, t: (torch.quantize_per_tensor(f.float(), 0.1, 0, torch.qint8), t),
        lambda b: (b[0].dequantize().double(), b[1]),
    ),
    "mkldnn": (lambda f, t: (f.float().to_mkldnn(), t), lambda b: (b[0].to_dense().double(), b[1])),
    "nested": (lambda f, t: (torch.nested.nested_tensor([f[:2], f[2:]]), t), lambda b: (torch.cat(b[0].unbind()), b[1])),
    "a tensor of a kind of its own": (lambda f, t: (f.as_subclass(Tagged), t), lambda b: (b[0].as_subclass(torch.Tensor), b[1])),
    "deque": (lambda f, t: deque([f, t]), tuple),
    "an object": (lambda f, t: types.SimpleNamespace(features=f, labels=t), fields_of),
    "objects in an array": (lambda f, t: (f, t, np.array([f, None], dtype=object)), first_two),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("what", UNKEPT)
def test_a_batch_that_no_file_holds_is_said_and_ends_no_run(what, tmp_path, caplog):
    pack, opened = UNKEPT[what]
    for steps in (3, 5):
        assert len(Made(Numbered(pack), opened=opened).fit(steps, tmp_path / "run.pt")[0]) == steps
    assert "can't be saved; the first step after loading is judged on its own batch" in caplog.text


def test_what_is_kept_of_a_forged_batch_is_said_and_not_used(caplog):
    made = Made(Numbered(lambda f, t: (f.numpy(), t)), opened=lambda b: tuple(map(torch.as_tensor, b)))
    made.fit(2)
    state = made.solver.state_dict()
    state["last_batch"]["leaves"][0]["dtype"] = "text"
    made.solver.load_state_dict(state)
    made.solver.step(made.upper(), made.lower)
    assert "can't be put together again" in caplog.text
    assert kept(types.MappingProxyType({"f": object()})) is None
