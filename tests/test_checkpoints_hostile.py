"""Checkpoints that were damaged, forged or made elsewhere: loaded exactly or refused, with nothing changed and nothing run.

`test_fit.py` has one case of each kind of refusal; here are many of each, and strangers.
"""

from __future__ import annotations

import copy
import io
import json
import os
import pickle
import random
import warnings
import zipfile
from contextlib import suppress
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from attacks import states as forging
from torch import nn

import bisls
from bisls.callbacks import EarlyStopping
from bisls.checkpoint import Checkpoint, CheckpointError
from bisls.randomness import random_state
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


@pytest.mark.slow
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


@pytest.mark.skipif(not hasattr(torch.serialization, "get_crc32_options"), reason="this torch always writes them")
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
    "the format alone": saved({"format": 2}),
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


@pytest.mark.parametrize("found", [0, 1, 99, "2", None, 1.5, [2]])
def test_another_format_is_refused_by_its_number(found, good, tmp_path):
    torch.save({**good[1], "format": found}, tmp_path / "run.pt")
    text = refused(tmp_path / "run.pt", "its format is .*, this version of bisls reads 2; resume with the version that")
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


SAME = {
    "callbacks = {}",
    "still = {}",
    f"k = {STEPS}",
    "solver without trend",
    "solver without choice",
    "solver without learnt",
    "solver without steady",
    "generators = 'LEFT OUT'",
    "generators = []",
    "modules = 'LEFT OUT'",
    "modules = []",
}


@pytest.mark.slow
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
        else:  # a run without callbacks, tol=None, or an older version is a run too; losses without generators draw from none
            assert what in SAME, what
        tried += 1
    assert tried > 130


def test_a_point_that_is_not_finite_or_of_another_shape_is_refused(good, tmp_path):
    content = good[1]
    for name in ("x", "y"):
        for wrong, reason in (
            (torch.full_like(content[name], float("nan")), "holds values that are not finite"),
            (content[name][:2], r"is a tensor, float64\[2\]; it must be a tensor of shape \(3,\)"),
            (content[name].float(), r"is a tensor, float32\[3\]; it must hold float64"),
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
    own = copy.deepcopy(good[1])
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


# --- forged numbers: every place of a state is read before anything is loaded


NAN = torch.full((3,), float("nan"), dtype=torch.float64)
PLACES = {
    "the last good point": (("good", 0), NAN, r"state\['good'\]\[0\] holds values that are not finite"),
    "a good point of another shape": (("good", 0), NAN[:2], r"the state is of a problem with 2 upper and 3 lower"),
    "a good point in half": (("good", 1), torch.ones(3).half(), r"state\['good'\]\[1\] is a tensor, float16\[3\]"),
    "a complex good point": (("good", 0), NAN.to(torch.complex64), "it must hold float64"),
    "a good point nowhere": (("good", 0), torch.empty_like(NAN, device="meta"), "it must be a tensor of shape"),
    "a sparse good point": (("good", 0), torch.ones(3).double().to_sparse(), "it must be a tensor of shape"),
    "k": (
        ("k",),
        2**70,
        r"state\['k'\] is 1180591620717411303424; it must be a whole number from 0 to 1000000000000000;",
    ),
    "a k that is none": (("k",), True, r"state\['k'\] is True"),
    "failures": (("failures",), -1, r"state\['failures'\] is -1; it must be a whole number"),
    "a step": (("upper", "memory", "step"), float("nan"), r"\['step'\] is nan; it must be a finite number, at least 0"),
    "a negative step": (("lower", "memory", "step"), -0.5, r"state\['lower'\]\['memory'\]\['step'\] is -0.5"),
    "notes": (("upper", "memory", "notes"), {"begin": "text"}, r"\['notes'\]\['begin'\] is 'text'"),
    "a note of nobody": (("upper", "memory", "notes"), {"other": 1.0}, "has 'other', which is not kept here"),
    "a mean": (("trend", "mean"), float("inf"), r"state\['trend'\]\['mean'\] is inf"),
    "a direction": (("upper", "direction", "m"), NAN, r"state\['upper'\]\['direction'\]\['m'\] holds values"),
    "a count": (("upper", "direction", "t"), torch.tensor(-1), r"\['t'\] holds values out of range"),
    "sums": (("upper", "direction", "sums"), NAN.new_tensor([0.0, 1.0, 0.0, 0.0]), r"\['sums'\] \(weight\) is 0.0"),
    "a batch": (("last_batch", "batch"), NAN, r"state\['last_batch'\] is another batch than it says"),
    "no batch": (("last_batch",), 7, r"state\['last_batch'\] is 7; it must be a batch"),
    "a lower level that is none": (("lower",), [], r"state\['lower'\] is a list; it must be a mapping of names"),
}


def stepped(**parts):
    made = bisls.BiSLS(problem(), lower_iters=2, direction=bisls.Denoised(b2=0.999), **parts)
    for k in range(2):
        made.step(rows(k), rows(k))
    return made


@pytest.mark.parametrize("what", PLACES)
def test_a_forged_number_is_refused_by_its_place_and_nothing_is_loaded(what):
    path, value, message = PLACES[what]
    state = forging.forged(copy.deepcopy(stepped().state_dict()), path, lambda old: value)
    made = bisls.BiSLS(problem(), lower_iters=2, direction=bisls.Denoised(b2=0.999))
    made.step(rows(5), rows(5))
    before = repr(listed(made.state_dict()))
    with pytest.raises(ValueError, match=message) as caught:
        made.load_state_dict(state)
    assert str(caught.value).startswith("`BiSLS.load_state_dict(...)`: ")
    assert repr(listed(made.state_dict())) == before


def test_the_state_of_parameters_that_somebody_has_spoilt_is_refused():
    made = stepped()
    with torch.no_grad():
        made.problem.x.tensors[0].fill_(float("nan"))
    made._good = None  # as at the first step of a run
    made.step(rows(3), rows(3))
    with pytest.raises(ValueError, match=r"state\['good'\]\[0\] holds values that are not finite; nothing was loaded"):
        stepped().load_state_dict(made.state_dict())


def test_a_state_from_before_the_first_step_or_of_a_first_one_that_failed_can_be_loaded():
    fresh = bisls.BiSLS(problem(), lower_iters=2)
    bisls.BiSLS(problem(), lower_iters=2).load_state_dict(fresh.state_dict())
    features, target = rows()
    failed = fresh.step((features, target * float("nan")), (features, target))
    assert failed.upper_status is bisls.Status.NON_FINITE
    again = bisls.BiSLS(problem(), lower_iters=2)
    again.load_state_dict(fresh.state_dict())
    assert repr(listed(again.state_dict())) == repr(listed(fresh.state_dict()))


def test_a_part_that_does_not_say_what_it_keeps_is_given_what_was_saved():
    class Own(bisls.Direction):
        def head(self, gradient, point, state):
            seen = float(state["lowest"]) if state else float("inf")
            kept = {
                "lowest": torch.tensor(min(seen, gradient.norm().item())),
                "unset": torch.tensor(float("inf")),
                "n": 3,
            }
            return bisls.Heading(gradient, gradient, kept)

    def made():
        return bisls.BiSLS(problem(), lower_iters=2, direction=Own())

    first = made()
    first.step(rows(), rows())
    second = made()
    second.load_state_dict(first.state_dict())
    assert listed(second.state_dict()) == listed(first.state_dict())
    assert second.state_dict()["upper"]["direction"]["unset"] == float("inf")


TORCH = {
    "a moment": (("state", 0, "exp_avg"), torch.full((2,), float("nan"), dtype=torch.float64), "hold.* no numbers"),
    "a moment of another shape": (("state", 0, "exp_avg"), torch.zeros(7), r"Adam\.step\(\) cannot go on from it"),
    "a count": (("state", 0, "step"), torch.tensor(-1.0), r"\['step'\] holds values that are no numbers, or no count"),
    "a sparse count": (
        ("state", 0, "step"),
        torch.ones(1).to_sparse(),
        r"\['step'\] is a tensor, float32\[1\] torch.sparse_coo",
    ),
    "a sparse moment": (
        ("state", 0, "exp_avg"),
        torch.ones(2).to_sparse(),
        r"\['exp_avg'\] is a tensor, .* one beside",
    ),
    "a rate": (("param_groups", 0, "lr"), float("nan"), r"\['param_groups'\]\[0\]\['lr'\] is nan"),
    "a sparse rate": (
        ("param_groups", 0, "lr"),
        torch.ones(1).to_sparse(),
        r"\['lr'\] is a tensor, float32\[1\] torch.sp",
    ),
    "betas": (("param_groups", 0, "betas"), 3, r"Adam\.step\(\) cannot go on from it"),
    "fewer parameters": (("param_groups", 0, "params"), [0], r"of groups of \[1\] parameters, those .* are of \[2\]"),
    "no groups": (("param_groups",), 7, "it lacks 'param_groups'"),
}


@pytest.mark.parametrize("what", TORCH)
def test_the_forged_state_of_a_lower_optimiser_is_refused(what):
    def made():
        own = problem()
        solver = bisls.BiSLS(own, lower_iters=2, lower_optimizer=torch.optim.Adam(own.y.tensors, lr=0.01))
        solver.step(rows(), rows())
        return solver

    path, value, message = TORCH[what]
    state = forging.forged(copy.deepcopy(made().state_dict()), ("lower", "optimizer", *path), lambda old: value)
    solver = made()
    before = repr(listed(solver.state_dict()))
    with pytest.raises(
        ValueError, match=rf"`BiSLS\.load_state_dict\(\.\.\.\)`: state\['lower'\]\['optimizer'\].*{message}"
    ):
        solver.load_state_dict(state)
    assert repr(listed(solver.state_dict())) == before


FILES = {
    "random numbers": (("random", "numpy", "state", "pos"), 10**6, r"random\['numpy'\]\['state'\]\['pos'\] is 1000000"),
    "words": (("random", "python", 1), torch.zeros(625, dtype=torch.int64), "zero throughout"),
    "a generator": (
        ("random", "torch"),
        torch.zeros(3, dtype=torch.uint8),
        r"random\['torch'\] is a tensor, uint8\[3\]",
    ),
    "a place in the rows": (("feeds", "lower", "own", "position"), 10**15, r"state\['position'\] is 1000000000000000"),
    "an order of the rows": (("feeds", "upper", "own", "order"), torch.zeros(24).long(), "is no order of the rows"),
    "a buffer": (("buffers", 0), torch.zeros(7), r"buffers\[0\] is a tensor, float32\[7\]"),
    "a best value": (("callbacks", "EarlyStopping 1", "best"), float("nan"), r"\['EarlyStopping 1'\]\['best'\] is nan"),
}


@pytest.mark.parametrize("what", FILES)
def test_a_forged_number_in_a_file_is_refused_by_its_place(what, good, tmp_path):
    path, value, message = FILES[what]
    content = forging.forged(copy.deepcopy(good[1]), ("ranks", 0, *path), lambda old: value)
    torch.save(content, tmp_path / "run.pt")
    refused(tmp_path / "run.pt", message)


@pytest.mark.parametrize(("place", "value"), [((0, "alpha"), "text"), ((0, "k"), 7), ((1, "upper_checks"), None)])
def test_records_that_are_none_are_refused(place, value, good, tmp_path):
    content = forging.forged(copy.deepcopy(good[1]), ("records", *place), lambda old: value)
    torch.save(content, tmp_path / "run.pt")
    refused(tmp_path / "run.pt", "cannot be resumed here: (the record of k = .* has no number as|it has 3 records)")


@pytest.mark.parametrize("name", ["upper", "lower"])
@pytest.mark.parametrize("number", ["taken", "total", "epoch"])
def test_a_place_that_no_iteration_reached_is_refused_before_a_batch_is_read(name, number, tmp_path):
    """A place of 1e15 batches would be looked for until the end of days."""
    subject, path = ("BiSLS", "iterator", ""), tmp_path / "run.pt"
    forging.Run(subject, path).fit(2)
    content = torch.load(path, weights_only=True)
    torch.save(forging.forged(content, ("ranks", 0, "feeds", name, number), lambda old: 10**15), path)
    run = forging.Run(subject, path)
    with pytest.raises(CheckpointError, match=rf"feeds\['{name}'\]\['{number}'\] is 1000000000000000; it must be"):
        run.fit(4)
    assert (run.upper.taken, run.lower.taken) == (0, 0)


def test_a_best_point_that_is_not_finite_is_never_put_back(tmp_path):
    subject, path = ("BiSLS", "one batch", ""), tmp_path / "run.pt"
    forging.Run(subject, path).fit(2)
    content = torch.load(path, weights_only=True)
    place = ("ranks", 0, "callbacks", "EarlyStopping 1", "point", 0)
    torch.save(forging.forged(content, place, lambda old: old * float("nan")), path)
    run = forging.Run(subject, path)
    with pytest.raises(
        CheckpointError, match=r"\['EarlyStopping 1'\]\['point'\]\[0\] holds values that are not finite"
    ):
        run.fit(2)
    assert torch.isfinite(run.own.x).all()
    state = EarlyStopping(3, restore=True).state_dict()
    for point in ([NAN, NAN], [NAN[:0]], 3):
        with pytest.raises(ValueError, match=r"`EarlyStopping\.load_state_dict\(\.\.\.\)`: state\['point'\]"):
            EarlyStopping(3, restore=True).load_state_dict({**state, "point": point})


OPTIMISER_PLACES = {
    "k": (("param_groups", 0, "k"), 2**70, r"\['k'\] is 1180591620717411303424"),
    "a remembered step": (("param_groups", 0, "remembered"), float("nan"), r"\['remembered'\] is nan"),
    "a rate": (("param_groups", 0, "lr"), float("nan"), r"\['lr'\] is nan; it must be a finite number, at least 0"),
    "a status": (("param_groups", 0, "last_status"), 99, r"\['last_status'\] is 99"),
    "the mode": (("param_groups", 0, "train_mode"), False, "the iterates to go back to are not there"),
    "a group": (("param_groups", 0), [], r"state\['param_groups'\]\[0\] is a list"),
    "a parameter twice": (("param_groups", 0, "params"), [0, 0], "names a parameter twice"),
    "a parameter's state": (("state",), {0: 3}, r"state\['state'\]\[0\] is 3; it must be a mapping"),
}


@pytest.mark.parametrize("what", OPTIMISER_PLACES)
@pytest.mark.parametrize("cls", OPTIMISERS)
def test_a_forged_number_in_the_state_of_an_optimiser_is_refused(cls, what):
    path, value, message = OPTIMISER_PLACES[what]
    refused_by(cls, {}, path, lambda old: value, message)


NUMBERS = ("weight_sum", "noise", "metric", "distance", "share")


@pytest.mark.parametrize("key", ["average", "z", "start", *NUMBERS])
@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -1.0])
def test_averages_that_are_not_finite_are_refused(key, wrong):
    message = rf"state\['state'\]\[0\]\['{key}'\] (is|holds values that are not finite)"
    if key not in NUMBERS and wrong < 0:
        return  # a point may be anywhere
    refused_by(
        bisls.optim.Auto, {}, ("state", 0, key), lambda old: old * 0 + wrong if key not in NUMBERS else wrong, message
    )


@pytest.mark.parametrize("key", ["noise", "metric", "distance"])
def test_a_state_of_before_each_tensor_had_its_own_step_is_refused_by_name(key):
    made, _ = trained(bisls.optim.Auto, (3, 2))
    state = copy.deepcopy(made.state_dict())
    del state["state"][0][key]
    with pytest.raises(ValueError, match=rf"state\['state'\]\[0\] lacks {key}; nothing was loaded"):
        made.load_state_dict(state)


def refused_by(cls, options, path, change, message):
    made, params = trained(cls, (3, 2), **options)
    state = forging.forged(copy.deepcopy(made.state_dict()), path, change)
    before = json.dumps([listed(made.state_dict()), [p.tolist() for p in params]])
    with pytest.raises(ValueError, match=message) as caught:
        made.load_state_dict(state)
    assert str(caught.value).startswith(f"`{cls.__name__}.load_state_dict(...)`: ")
    assert str(caught.value).endswith("; nothing was loaded")
    assert json.dumps([listed(made.state_dict()), [p.tolist() for p in params]]) == before


@pytest.mark.parametrize("unit", [0.0, 0, -1.0, float("nan"), float("inf"), "1", None, torch.ones(()), 1e-310])
def test_a_forged_unit_is_refused(unit):
    message = r"state\['param_groups'\]\[0\]\['unit'\] is "
    refused_by(bisls.optim.Auto, {}, ("param_groups", 0, "unit"), lambda old: unit, message)


def test_a_loss_that_grows_out_of_all_proportion_to_its_first_value_ends_no_run():
    w = torch.ones(2, dtype=torch.float64, requires_grad=True)
    scale = [1e-290]
    optimizer = bisls.optim.Auto([w])
    for _ in range(6):
        optimizer.step(lambda: scale[0] * ((w - 3) ** 2).sum())
        scale[0] = 1e5
    assert torch.isfinite(w).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("key", ["average", "z", "start"])
@pytest.mark.parametrize("cls", [bisls.optim.Auto, bisls.optim.SPSMax])
def test_averages_in_another_precision_are_brought_to_one_that_can_be_used(cls, key, dtype):
    made, params = trained(cls, (3, 2), **({} if cls is bisls.optim.Auto else {"averaging": True}))
    state = copy.deepcopy(made.state_dict())
    if key not in state["state"][0]:
        return
    state["state"][0][key] = state["state"][0][key].to(dtype)
    made.load_state_dict(state)
    assert made.state[params[0]][key].dtype == torch.promote_types(params[0].dtype, torch.float32)
    for _ in range(2):
        made.step(lambda: sum((p**2).sum() for p in params))
    assert all(torch.isfinite(p).all() for p in params)


def test_an_average_that_its_parameter_cannot_hold_is_refused():
    params = [torch.ones(2, dtype=torch.float16, requires_grad=True)]
    made = bisls.optim.SPSMax(params, averaging=True)
    made.step(lambda: (params[0].float() ** 2).sum())
    state = copy.deepcopy(made.state_dict())
    state["state"][0]["average"] = torch.full((2,), 1e6)
    with pytest.raises(ValueError, match=r"\['average'\] has numbers that its parameter, in float16, cannot hold"):
        made.load_state_dict(state)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64])
@pytest.mark.parametrize("what", forging.FORGERIES)
def test_every_forgery_can_be_made_of_any_tensor(what, dtype):
    forging.FORGERIES[what](torch.ones(3, dtype=dtype))


@pytest.mark.parametrize("kind", forging.TRIED)
def test_a_seeded_slice_of_the_forgeries(kind):
    """`make attack` tries them without end."""
    chosen = [case for case in islice(forging.cases(12), 300) if case.kind == kind][:25]
    assert [(case, broken) for case in chosen if (broken := forging.tried(case))] == []


@pytest.mark.slow
def test_forgeries_of_every_composition():
    rng = random.Random(5)
    subjects = [("states of solvers", (name, rng.choice(list(forging.NOISE)), "")) for name in forging.SOLVERS]
    subjects += [("states of optimisers", (name, "float32", "")) for name in forging.OPTIMISERS]
    for kind, subject in subjects:
        for _ in range(8):
            case = forging.Case(kind, subject, rng.random(), rng.choice(list(forging.FORGERIES)))
            assert forging.tried(case) is None, case
