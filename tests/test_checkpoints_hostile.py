"""Checkpoints that were damaged, forged or made elsewhere: loaded exactly or refused, with nothing changed and nothing run.

`test_fit.py` has one case of each kind of refusal; here are many of each, and strangers.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import warnings
import zipfile
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import bisls
from bisls.callbacks import EarlyStopping
from bisls.checkpoint import Checkpoint, CheckpointError
from bisls.feed import random_state
from bisls.tasks.base import Batches

STEPS = 3


def rows(seed: int = 0):
    rng = torch.Generator().manual_seed(seed)
    features = torch.randn(24, 3, generator=rng, dtype=torch.float64)
    return features, features @ torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)


def problem(shapes=((2,), (1,)), dtype=torch.float64, **bounds):
    """Ridge regression with a penalty a feature; x and y are spread over tensors of these shapes."""
    x = [torch.full(shape, -1.0, dtype=dtype, requires_grad=True) for shape in shapes]
    y = [torch.full(shape, 0.5, dtype=dtype, requires_grad=True) for shape in shapes]
    counter = torch.zeros(2)

    def flat(tensors):
        return torch.cat([tensor.reshape(-1) for tensor in tensors])

    def loss(batch):
        features, target = (part.to(dtype) for part in batch)
        counter.add_(1.0)
        return ((features @ flat(y) - target) ** 2).mean()

    return bisls.Bilevel(
        loss, lambda batch: loss(batch) + (flat(x).exp() * flat(y) ** 2).sum(), x, y, buffers=[counter], **bounds
    )


class Watched:
    """All that a run has, so that every trace of a load can be seen."""

    def __init__(self, made=None, lower=None, callbacks=None, path=None):
        torch.manual_seed(1)
        np.random.seed(1)  # noqa: NPY002
        self.solver = made or bisls.BiSLS(problem(), lower_iters=2)
        self.upper, self.lower = Batches(rows(), 8, seed=3), lower or Batches(rows(1), 6, seed=4)
        self.callbacks = [EarlyStopping(50)] if callbacks is None else callbacks
        self.net = nn.BatchNorm1d(3)
        self.path = path

    def checkpoint(self):
        return Checkpoint(self.path, extra={"net": self.net})

    def resume(self, steps=STEPS):
        return bisls.fit(
            self.solver, self.upper, self.lower, steps, False, self.callbacks, self.checkpoint(), True, "ignore"
        )

    def traces(self) -> str:
        """Everything, exactly: numbers are printed so that they come back."""
        stateful = [own for own in (self.upper, self.lower, *self.callbacks) if hasattr(own, "state_dict")]
        problem = self.solver.problem
        return json.dumps(
            [
                [problem.x.read().tolist(), problem.y.read().tolist(), [b.tolist() for b in problem.buffers]],
                [listed(own.state_dict()) for own in (self.solver, self.net, *stateful)],
                listed(random_state()),
            ]
        )


def listed(value):
    if isinstance(value, torch.Tensor):
        return [str(value.dtype), value.tolist()]
    if isinstance(value, dict):
        return {str(name): listed(own) for name, own in value.items()}
    return [listed(own) for own in value] if isinstance(value, list | tuple) else value


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """A whole file, what it holds, and what a run that loads it looks like."""
    path = tmp_path_factory.mktemp("good") / "run.pt"
    first = Watched(path=path)
    first.net(torch.randn(8, 3))
    history = first.resume()
    again = Watched(path=path)
    loaded = again.resume()
    assert [record.to_dict() for record in loaded] == [record.to_dict() for record in history]
    assert len(loaded) == STEPS
    return path.read_bytes(), torch.load(path, weights_only=True), again.traces(), history


def refused(path: Path, match: str = "", **made) -> str:
    """Loading is refused with the file, a reason and a remedy, and not a bit has changed."""
    run = Watched(path=path, **made)
    before = run.traces()
    with pytest.raises(CheckpointError, match=match) as caught:
        run.resume()
    assert run.traces() == before
    text = str(caught.value)
    assert repr(str(path)) in text
    assert any(remedy in text for remedy in ("delete it", "another path", "start as many", "pass the same"))
    return text


def attempt(run: Watched, **options):
    """The history, or why there is none."""
    try:
        return run.resume(**options), ""
    except CheckpointError as error:
        return [], str(error)


# --- damage


def test_a_file_cut_anywhere_is_refused(good, tmp_path):
    raw, path = good[0], tmp_path / "run.pt"
    lengths = [*range(0, len(raw) - 100, 401), *range(len(raw) - 100, len(raw), 7), len(raw) - 1]
    for length in lengths:
        path.write_bytes(raw[:length])
        refused(path, "not a whole checkpoint of bisls")


def flipped(raw: bytes, place: int, bit: int) -> bytes:
    changed = bytearray(raw)
    changed[place] ^= 1 << bit
    return bytes(changed)


def test_a_flipped_bit_is_refused_or_changes_nothing(good, tmp_path):
    """torch itself reads a file without comparing checksums, and loads other numbers instead."""
    raw, _, traces, history = good
    path, counts = tmp_path / "run.pt", {"refused": 0, "exact": 0}
    for place in range(0, len(raw), len(raw) // 300):
        path.write_bytes(flipped(raw, place, place % 8))
        run = Watched(path=path)
        before = run.traces()
        loaded, error = attempt(run)
        if error:
            assert repr(str(path)) in error
            assert run.traces() == before
            counts["refused"] += 1
        else:  # padding, names and dates in the archive
            assert run.traces() == traces
            assert [record.to_dict() for record in loaded] == [record.to_dict() for record in history]
            counts["exact"] += 1
    assert counts["refused"] > 100
    assert counts["exact"] > 10


def test_a_number_changed_inside_is_refused(good, tmp_path):
    """The bytes of x itself: the file looks whole in every other way."""
    raw, content, _, _ = good
    needle = content["x"].numpy().tobytes()
    assert raw.count(needle) >= 1
    path = tmp_path / "run.pt"
    path.write_bytes(flipped(raw, raw.index(needle) + 2, 3))
    assert not torch.equal(torch.load(path, weights_only=True)["x"], content["x"])  # torch does not see it
    refused(path, "the checksum of its part .* is wrong")


def test_checksums_are_written_also_where_somebody_turned_them_off(tmp_path):
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        Watched(path=tmp_path / "run.pt").resume()
        assert torch.serialization.get_crc32_options() is False
    finally:
        torch.serialization.set_crc32_options(before)
    assert len(Watched(path=tmp_path / "run.pt").resume()) == STEPS


def archive(**parts: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as into:
        for name, content in parts.items():
            into.writestr(f"run/{name.replace('_', '.')}", content)
    return file.getvalue()


def saved(content) -> bytes:
    file = io.BytesIO()
    torch.save(content, file)
    return file.getvalue()


FOREIGN = {
    "nothing": b"",
    "text": b"not a checkpoint\n" * 40,
    "zeros": bytes(5000),
    "a picture": b"\x89PNG\r\n\x1a\n" + bytes(200),
    "an empty archive": archive(),
    "another archive": archive(readme_txt=b"hello"),
    "a pickle that ends early": archive(data_pkl=pickle.dumps({"format": 1}, 2)[:-1], version=b"3\n"),
    "a tensor": saved(torch.ones(3)),
    "a list": saved([1, 2]),
    "a state_dict": saved(nn.Linear(2, 2).state_dict()),
    "None": saved(None),
    "the format alone": saved({"format": 1}),
    "a plain pickle": pickle.dumps({"format": 1}),
}


@pytest.mark.parametrize("what", FOREIGN)
def test_a_file_of_another_kind_is_refused(what, tmp_path):
    (tmp_path / "run.pt").write_bytes(FOREIGN[what])
    refused(tmp_path / "run.pt", "not a whole checkpoint of bisls")


def test_places_that_hold_no_file_are_refused_at_once(tmp_path):
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for name, reason in (("folder", "this is a folder; name a file in it"), ("pipe", "this is not a regular file")):
        run = Watched(path=tmp_path / name)
        before = run.traces()
        with pytest.raises(ValueError, match=rf"`fit\(checkpoint='.*{name}'\)`: {reason}"):
            run.resume()
        assert run.traces() == before
    with pytest.raises(ValueError, match=r"`Checkpoint\(path='a\\x00b'\)`: path must name a file"):
        Checkpoint("a\0b")


# --- forgery: parts that are missing, of another kind, or do not belong together


@pytest.mark.parametrize("found", [0, 2, 99, "1", None, 1.5, [1]])
def test_another_format_is_refused_by_its_number(found, good, tmp_path):
    torch.save({**good[1], "format": found}, tmp_path / "run.pt")
    text = refused(tmp_path / "run.pt", "its format is .*, this version of bisls reads 1; resume with the version that")
    assert bisls.__version__ in text


def variants(content):
    """The same file with one part left out or replaced, at every depth that matters."""
    part = content["ranks"][0]
    for where in (content, part):
        for name in where:
            if name in ("format", "versions"):
                continue
            for value in (None, "LEFT OUT", 3, -1, "text", [], {}, torch.tensor([float("nan")]), [[]]):
                changed = {own: entry for own, entry in where.items() if own != name}
                if not (isinstance(value, str) and value == "LEFT OUT"):
                    changed[name] = value
                yield f"{name} = {value!r}", changed if where is content else {**content, "ranks": [changed]}
    for group in ("solver", "feeds", "random"):
        for name in part[group]:
            left = {own: entry for own, entry in part[group].items() if own != name}
            yield f"{group} without {name}", {**content, "ranks": [{**part, group: left}]}


SAME = {"callbacks = {}", f"k = {STEPS}"}


def test_a_file_with_one_part_changed_is_refused_or_understood(good, tmp_path):
    path, tried = tmp_path / "run.pt", 0
    for what, content in variants(good[1]):
        torch.save(content, path)
        run = Watched(path=path)
        before = run.traces()
        _, error = attempt(run, steps=0)
        if error:
            assert repr(str(path)) in error, what
            assert run.traces() == before, what
        else:  # a run that had no callbacks is a run too
            assert what in SAME, what
        tried += 1
    assert tried > 130


def test_a_point_that_is_not_finite_or_of_another_shape_is_refused(good, tmp_path):
    content = good[1]
    for name in ("x", "y"):
        for wrong, reason in (
            (torch.full_like(content[name], float("nan")), "has numbers that are not finite"),
            (content[name][:2], r"is torch.float64 of shape \(2,\), not the 3 numbers of its parameters"),
            (content[name].float(), r"is torch.float32 of shape \(3,\)"),
        ):
            torch.save({**content, name: wrong}, tmp_path / "run.pt")
            refused(tmp_path / "run.pt", f"{name} {reason}")


# --- another problem, another method


OTHERS = {
    "another dtype": lambda: bisls.BiSLS(problem(dtype=torch.float32), lower_iters=2),
    "another number of tensors": lambda: bisls.BiSLS(problem(((3,),)), lower_iters=2),
    "another order of tensors": lambda: bisls.BiSLS(problem(((1,), (2,))), lower_iters=2),
    "other shapes of the same size": lambda: bisls.BiSLS(problem(((1, 2), (1,))), lower_iters=2),
    "another length of the lower loop": lambda: bisls.BiSLS(problem(), lower_iters=3),
    "another method": lambda: bisls.BiSPS(problem(), lower_iters=2),
    "the paper's": lambda: bisls.BiSLS.paper(problem(), lower_iters=2),
    "another direction": lambda: bisls.BiSLS(problem(), lower_iters=2, direction=bisls.Steepest()),
    "another start": lambda: bisls.BiSLS(problem(), lower_iters=2, alpha=0.1),
    "another linear solver": lambda: bisls.BiSLS(problem(), lower_iters=2, hypergrad=bisls.Implicit(bisls.CG(iters=3))),
}


@pytest.mark.parametrize("what", OTHERS)
def test_a_checkpoint_of_another_problem_or_method_is_refused(what, good, tmp_path):
    (tmp_path / "run.pt").write_bytes(good[0])
    refused(tmp_path / "run.pt", "is of another (problem|method)", made=OTHERS[what]())


def test_a_point_outside_the_bounds_of_here_is_refused(good, tmp_path):
    (tmp_path / "run.pt").write_bytes(good[0])
    for bounds in ({"upper_bounds": bisls.Box(-1.0, -0.9999999)}, {"lower_bounds": bisls.Box(0.5, 0.5000001)}):
        made = bisls.BiSLS(problem(**bounds), lower_iters=2)
        refused(tmp_path / "run.pt", "[xy] lies outside the bounds that it has here", made=made)


# --- nothing is half loaded


class Refuses(EarlyStopping):
    """A callback that takes half of its state and then fails."""

    def load_state_dict(self, state):
        self.best = float(state["best"])
        if "waited" in state and state["waited"] >= 0 and self.best < float("inf"):
            raise KeyError("half way")


class HalfWay(Batches):
    """Data that move, and then fail: the last part of a load."""

    def load_state_dict(self, state):
        super().load_state_dict(state)
        if state["position"] > 0:
            raise RuntimeError("the disk is gone")


def test_what_fails_half_way_takes_everything_back(good, tmp_path):
    (tmp_path / "run.pt").write_bytes(good[0])
    refused(
        tmp_path / "run.pt",
        "cannot be resumed here: the disk is gone. Nothing was loaded; make solver, data and",
        lower=HalfWay(rows(1), 6, seed=4),
    )
    own = good[1]
    own["ranks"][0]["callbacks"] = {"Refuses 1": {"best": 1.0, "best_k": 0, "waited": 0}}
    torch.save(own, tmp_path / "run.pt")
    refused(tmp_path / "run.pt", r"cannot be resumed here: KeyError: 'half way'", callbacks=[Refuses(5)])


# --- strangers


class Bomb:
    """An object whose pickle runs a command when it is read."""

    def __init__(self, sentinel: Path, how):
        self.sentinel, self.how = sentinel, how

    def __reduce__(self):
        if self.how == "system":
            return os.system, (f"touch {self.sentinel}",)
        if self.how == "eval":
            return eval, (f"open({str(self.sentinel)!r}, 'w').close()",)
        return Path.touch, (self.sentinel,)


def bombs(content, sentinel: Path, how: str):
    """Files that go off when they are unpickled: as the file, deep inside a whole one, and in other formats of torch."""
    bomb, part = Bomb(sentinel, how), content["ranks"][0]
    inside = {**content, "ranks": [{**part, "callbacks": {"EarlyStopping 1": {"best": bomb}}}]}
    for whole in (bomb, {**content, "format": bomb}, {**content, "x": bomb}, inside):
        yield saved(whole)
    old = io.BytesIO()
    torch.save(inside, old, _use_new_zipfile_serialization=False)
    yield old.getvalue()
    yield pickle.dumps(inside)
    yield archive(data_pkl=pickle.dumps(inside, 2), version=b"3\n", byteorder=b"little")
    yield archive(data_pkl=pickle.dumps(inside, 2), constants_pkl=pickle.dumps(bomb, 2), version=b"3\n")


@pytest.mark.parametrize("how", ["system", "eval", "method"])
def test_a_checkpoint_from_a_stranger_runs_no_code(how, good, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")  # others may need it; it is not asked here
    sentinel, path = tmp_path / "ran", tmp_path / "run.pt"
    live = 0
    for raw in bombs(good[1], sentinel, how):
        path.write_bytes(raw)
        refused(path, "not a whole checkpoint of bisls")
        assert not sentinel.exists()
        with warnings.catch_warnings(), suppress(Exception):  # that it would have run, had it been read the other way
            warnings.simplefilter("ignore")
            torch.load(path, weights_only=False)
        live += sentinel.exists()
        sentinel.unlink(missing_ok=True)
    assert live >= 5


# --- the optimisers' own states


OPTIMISERS = [bisls.optim.Auto, bisls.optim.SPSMax, bisls.optim.DecSPS, bisls.optim.SPSB, bisls.optim.SLS]


def trained(cls, sizes, **options):
    params = [torch.linspace(-1.0, 1.0, size, dtype=torch.float64).requires_grad_() for size in sizes]
    made = cls(params, **options)
    for _ in range(3):
        made.step(lambda: sum(((p - 0.3) ** 2).sum() for p in params))
    return made, params


@pytest.mark.parametrize("cls", OPTIMISERS)
def test_a_state_of_another_optimiser_or_model_is_refused(cls, tmp_path):
    averaging = {} if cls is bisls.optim.Auto else {"averaging": True}
    made, params = trained(cls, (3, 2), **averaging)
    sgd = torch.optim.SGD([torch.zeros(3, requires_grad=True), torch.zeros(2, requires_grad=True)], momentum=0.9)
    others = [
        (sgd.state_dict(), "the state is of another optimiser"),
        (trained(cls, (2, 3), **averaging)[0].state_dict(), r"has shape \(2,\), its parameter \(3,\)"),
        (trained(cls, (3,), **averaging)[0].state_dict(), "parameter group|parameters"),
        ({"state": {}}, "the state lacks param_groups"),
        ({"param_groups": []}, "the state lacks state"),
        ([], "must be what state_dict"),
    ]
    for state, message in others:
        before = json.dumps([listed(made.state_dict()), [p.tolist() for p in params]])
        with pytest.raises(ValueError, match=message):
            made.load_state_dict(state)
        assert json.dumps([listed(made.state_dict()), [p.tolist() for p in params]]) == before
    torch.save(made.state_dict(), tmp_path / "own.pt")
    again, params = trained(cls, (3, 2), **averaging)
    again.load_state_dict(torch.load(tmp_path / "own.pt", weights_only=True))
    assert listed(again.state_dict()) == listed(made.state_dict())
