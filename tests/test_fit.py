"""The loop: every kind of data, exact resume, kills and interrupts, checkpoints that do not fit, callbacks, failures."""

from __future__ import annotations

import itertools
import json
import logging
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

import bisls
from bisls.callbacks import Callback, EarlyStopping, Evaluate, JSONLines, TensorBoard
from bisls.checkpoint import Checkpoint, CheckpointError
from bisls.feed import Exhausted, feed
from bisls.fit import FitError, Interrupted, fit
from bisls.methods import Alternating, BiSLS
from bisls.progress import Progress
from bisls.randomness import random_state
from bisls.record import History, Record, Status
from bisls.tasks.base import Batches

STEPS = 9


def table(rows: int = 40, seed: int = 0):
    rng = torch.Generator().manual_seed(seed)
    features = torch.randn(rows, 4, generator=rng, dtype=torch.float64)
    weights = torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=torch.float64)
    return features, features @ weights + torch.randn(rows, generator=rng, dtype=torch.float64)


def problem(size: int = 4):
    """Ridge regression with a penalty a feature; both losses drop features at random."""
    x = torch.full((size,), -1.0, dtype=torch.float64, requires_grad=True)
    y = torch.linspace(-0.5, 1.0, size, dtype=torch.float64).requires_grad_()

    def loss(batch):
        features, target = batch
        return ((torch.dropout(features, 0.2, True) @ y - target) ** 2).mean()

    return bisls.Bilevel(loss, lambda batch: loss(batch) + (x.exp() * y**2).sum(), [x], [y])


def solver(cls=BiSLS, **options):
    return cls(problem(), **{"lower_iters": 2, "hypergrad": bisls.Implicit(bisls.CG(iters=4)), **options})


def outcome(made, history):
    """All that a run leaves, exactly: floats are printed so that they come back."""
    return (
        made.problem.x.read().tolist(),
        made.problem.y.read().tolist(),
        [json.dumps(record.to_dict()) for record in history],
        history.evaluations,
        torch.rand(3).tolist(),
        [random.random(), float(np.random.random())],  # noqa: NPY002
    )


class Shuffled:
    """Can be iterated over again and again; the order comes from numpy's and Python's global generators."""

    def __iter__(self):
        features, target = table()
        order = np.random.permutation(40).tolist()  # noqa: NPY002
        random.shuffle(order)
        for i in range(0, 40, 8):
            yield features[order[i : i + 8]], target[order[i : i + 8]]


class StatefulLoader:
    """As torchdata's StatefulDataLoader: not an iterator, goes on in the middle of an epoch, and at its end yields nothing."""

    def __init__(self):
        self.order, self.place = None, 0

    def __iter__(self):
        if self.order is None:
            self.order = torch.randperm(40)
        features, target = table()
        while self.place < 5:
            rows = self.order[8 * self.place : 8 * self.place + 8]
            self.place += 1
            yield features[rows], target[rows]
        self.order, self.place = None, 0

    def state_dict(self):
        return {"order": self.order, "place": self.place}

    def load_state_dict(self, state):
        self.order, self.place = state["order"], state["place"]


class Counting:
    """A callable with a state of its own."""

    def __init__(self):
        self.calls = 0

    def __call__(self):
        self.calls += 1
        features, target = table()
        return features[self.calls % 7 :: 7], target[self.calls % 7 :: 7]

    def state_dict(self):
        return {"calls": np.int64(self.calls)}  # scalars of numpy must not spoil the file

    def load_state_dict(self, state):
        self.calls = state["calls"]


def generated():
    features, target = table()
    for row in itertools.cycle(torch.randperm(40).tolist()):
        rows = torch.randint(40, (5,)).tolist()
        yield features[[row, *rows]], target[[row, *rows]]


def called():
    rows = torch.randint(40, (8,))
    return tuple(part[rows] for part in table())


def replaced():
    generator = torch.Generator().manual_seed(5)
    data = TensorDataset(*table())
    return DataLoader(data, 8, sampler=RandomSampler(data, replacement=True, generator=generator))


KINDS = {
    "tuple": table,
    "loader": lambda: DataLoader(TensorDataset(*table()), 8, shuffle=True),
    "loader with a generator": lambda: DataLoader(
        TensorDataset(*table()), 7, shuffle=True, generator=torch.Generator().manual_seed(4)
    ),
    "loader with replacement": replaced,
    "iterable": Shuffled,
    "stateful iterator": lambda: Batches(table(), 8, seed=3),
    "stateful loader": StatefulLoader,
    "generator": generated,
    "callable": lambda: called,
    "stateful callable": Counting,
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_is_the_run(kind, tmp_path):
    def go(steps, resume=False, seed=1, path=None):
        torch.manual_seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        random.seed(seed)
        made = solver()
        watch = [Evaluate(lambda: {"draw": torch.rand(1).item()}, every=3, name="draw")] if steps == STEPS else []
        history = fit(made, KINDS[kind](), KINDS[kind](), steps, False, watch, path, resume)
        return outcome(made, history)

    whole = go(STEPS)
    assert len(whole[2]) == STEPS
    for stop in (1, 5, 8):  # 5 ends an epoch
        path = tmp_path / f"{stop}.pt"
        go(stop, path=path)
        again = go(STEPS, resume=True, seed=77, path=path)  # whatever the random state is when it is started again
        expected = [row for row in whole[3] if row["k"] >= stop]  # the first part had nobody to evaluate
        assert again[:3] == whole[:3]
        assert again[3] == expected
        assert again[4:] == whole[4:]
        assert go(STEPS, resume=True, seed=5, path=path)[:3] == whole[:3]  # finished: nothing more is done
        assert [file.name for file in tmp_path.glob("*tmp")] == []


def test_lower_data_are_drawn_t_at_a_time_and_a_whole_batch_is_not_a_list():
    seen = []
    made = solver(lower_iters=3, lower_tol=1e9)  # ends the lower loop at once: the draws must not depend on it
    original = made.step
    made.step = lambda upper, lower, other: (seen.append((upper, lower)), original(upper, lower, other))[1]
    source = Counting()
    fit(made, table(), source, steps=2, progress=False)
    assert source.calls == 6
    assert [len(lower) for _, lower in seen] == [3, 3]
    fit(made, table(), table(), steps=1, progress=False)
    assert isinstance(seen[-1][1], tuple)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([torch.ones(2)], r"`fit\(upper_data=\[...\]\)`: a list may mean one batch or several; pass tuple"),
        ((), r"`fit\(upper_data=tuple\(...\)\)`: a tuple is one batch and must hold tensors, this one is empty"),
        (
            (torch.ones(2), object()),
            r"must hold tensors, found a object; for batches one after another pass a DataLoader",
        ),
        ({"a": DataLoader([1])}, r"a dict is one batch and must hold tensors, found a DataLoader"),
        (np.array(["a", "b"]), r"this ndarray cannot be read as numbers .*torch.as_tensor\(...\)"),
        (TensorDataset(torch.ones(3)), r"a dataset has samples, not batches; wrap it: torch.utils.data.DataLoader"),
        (DataLoader, r"this is a class; pass an instance"),
        ("train.csv", r"`fit\(upper_data='train.csv'\)`: cannot be read as data; pass a tensor"),
        (3, r"cannot be read as data"),
        (generated, r"called for each batch, and returned a generator; pass what it returns rather than the callable"),
        (lambda batch: batch, r"the callable must work without arguments \(missing a required argument: 'batch'\)"),
    ],
)
def test_data_that_cannot_be_used_are_refused_with_advice(data, message):
    with pytest.raises(ValueError, match=message):
        fit(solver(), data, table(), progress=False)


def test_an_empty_loader_is_refused():
    loader = DataLoader(TensorDataset(*table()), 64, drop_last=True)
    with pytest.raises(
        ValueError, match=r"`fit\(lower_data=DataLoader\(...\)\)`: an epoch gave no batch; .*drop_last=True"
    ):
        fit(solver(), table(), loader, progress=False)


def test_one_loader_that_can_be_read_only_once_at_a_time_is_refused_for_both_levels():
    loader = StatefulLoader()
    with pytest.raises(ValueError, match=r"the two would share one loader.*make a loader for each"):
        fit(solver(), loader, loader, progress=False)


def test_a_dict_of_tensors_and_none_are_one_batch():
    assert feed({"a": torch.ones(2)}, "upper_data").whole
    assert feed(None, "upper_data").take() is None


def test_the_run_ends_where_an_iterator_does_and_goes_on_with_a_longer_one(tmp_path, caplog):
    def rows(n):
        return itertools.islice(KINDS["stateful iterator"](), n)

    torch.manual_seed(1)
    whole = solver()
    expected = fit(whole, rows(9), KINDS["loader"](), 9, False)
    torch.manual_seed(1)
    with caplog.at_level(logging.INFO):
        history = fit(solver(), rows(4), KINDS["loader"](), 9, False, checkpoint=tmp_path / "run.pt")
    assert len(history) == 4
    assert "the run ends at k = 4" in caplog.text
    assert "the iterator ended after 4 batches; for more, pass a DataLoader" in caplog.text
    again = solver()
    history = fit(again, rows(20), KINDS["loader"](), 9, False, checkpoint=tmp_path / "run.pt", resume=True)
    assert outcome(again, history)[:3] == outcome(whole, expected)[:3]
    with pytest.raises(
        CheckpointError, match="9 batches had been taken when the place was saved, but the data end after 2"
    ):
        fit(solver(), rows(2), KINDS["loader"](), 9, False, checkpoint=tmp_path / "run.pt", resume=True)
    with pytest.raises(Exhausted):
        feed(iter(()), "upper_data").take()


def test_a_loader_whose_next_epoch_began_where_the_other_data_ended_keeps_its_order(tmp_path):
    """The fourth iteration begins an epoch above, and then nothing is left below."""

    def go(n, **options):
        torch.manual_seed(1)
        made, generator = solver(), torch.Generator().manual_seed(2)
        upper = DataLoader(TensorDataset(*table()), 16, shuffle=True, generator=generator)
        assert len(upper) == 3
        lower = itertools.islice(KINDS["stateful iterator"](), n)
        return outcome(made, fit(made, upper, lower, STEPS, False, **options))[:3]

    taken = solver().lower_iters + solver().extra_batches
    go(3 * taken + 1, checkpoint=tmp_path / "run.pt")
    assert go(99 * taken, checkpoint=tmp_path / "run.pt", resume=True) == go(99 * taken)


class Numbered:
    """Batches one after another, with a place of its own."""

    def __init__(self):
        self.n = 0

    def __call__(self):
        self.n += 1
        return tuple(part[self.n :: 7] for part in table())

    def state_dict(self):
        return {"n": self.n}

    def load_state_dict(self, state):
        self.n = state["n"]


def drawn_by_a_generator():
    own = random.Random(3)
    return lambda: tuple(part[own.randrange(5) :: 7] for part in table())


@pytest.mark.parametrize("make", [Numbered, drawn_by_a_generator])
def test_a_callback_may_draw_from_the_data_of_the_run(make, tmp_path):
    def go(steps, **options):
        torch.manual_seed(1)
        made, data = solver(), make()
        look = Evaluate(lambda: float(data()[0].sum()))
        history = fit(made, data, table(), steps, False, callbacks=[look], **options)
        return outcome(made, history)[:3], history.evaluations

    go(3, checkpoint=tmp_path / "run.pt")
    assert go(STEPS, checkpoint=tmp_path / "run.pt", resume=True) == go(STEPS)


def test_two_loaders_may_share_a_generator(tmp_path):
    def go(steps, **options):
        torch.manual_seed(1)
        made, generator = solver(), torch.Generator().manual_seed(2)
        data = [DataLoader(TensorDataset(*table()), size, shuffle=True, generator=generator) for size in (20, 14)]
        return outcome(made, fit(made, *data, steps, False, **options))[:3]

    go(3, checkpoint=tmp_path / "run.pt")
    assert go(STEPS, checkpoint=tmp_path / "run.pt", resume=True) == go(STEPS)


def test_workers_that_persist_keep_the_order():
    def loader():
        return DataLoader(TensorDataset(torch.arange(6)), 2, shuffle=True, num_workers=1, persistent_workers=True)

    torch.manual_seed(3)
    first = feed(loader(), "upper_data")
    for _ in range(4):
        first.take()
    place, now = first.state_dict(), torch.get_rng_state()
    rest = [first.take()[0].tolist() for _ in range(5)]
    second = feed(loader(), "upper_data")
    second.load_state_dict(place)
    torch.set_rng_state(now)
    assert [second.take()[0].tolist() for _ in range(5)] == rest


KILLED = '''
import io, json, os, random, signal, sys, time
from pathlib import Path
import torch
torch.set_num_threads(1)
sys.path.insert(0, {tests!r})
from test_fit import Shuffled, KINDS, solver
from bisls.callbacks import EarlyStopping, JSONLines
from bisls.checkpoint import Checkpoint
from bisls.fit import fit

folder, steps, save = Path(sys.argv[1]), 30, torch.save

def result(made, history, path):
    torch.save([made.problem.x.read(), made.problem.y.read(), [json.dumps(r.to_dict()) for r in history]], path)

def slow():
    """Writes take long, so that many kills fall into them: half of the bytes, a rest, the others, a rest, the move."""
    replace = os.replace
    def slow_save(content, file):
        whole = io.BytesIO()
        save(content, whole)
        half = len(whole.getvalue()) // 2
        file.write(whole.getvalue()[:half]); file.flush()
        if os.environ.get("BISLS_TEST_HANG") == "checkpoint":
            hang()
        time.sleep(0.01); file.write(whole.getvalue()[half:])
    def hang():
        (folder / os.environ["BISLS_TEST_HANG"]).touch()
        time.sleep(600)
    def slow_replace(source, target):
        if os.environ.get("BISLS_TEST_HANG") == "log" and str(target).endswith("killed.jsonl"):
            hang()
        time.sleep(0.005); replace(source, target); time.sleep(0.005)
    torch.save, os.replace = slow_save, slow_replace

def child(path, killed):
    torch.manual_seed(99 if killed and (folder / "run.pt").exists() else 0)
    made, options = solver(), {{}}
    if killed:
        slow()
        options = dict(checkpoint=Checkpoint(folder / "run.pt", every=2), resume=True)
    history = fit(made, KINDS["loader"](), KINDS["generator"](), steps, False, [JSONLines(f"{{path}}.jsonl"),
                  EarlyStopping(1000)], **options)
    torch.save = save
    result(made, history, path)

def start(*arguments):
    pid = os.fork()
    if pid == 0:
        try:
            child(*arguments)
        except BaseException:
            import traceback; traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return pid

child(folder / "whole", False)  # here, so that all is imported before the first fork
dice, kills, torn, logs = random.Random(0), 0, 0, 0
while True:
    # one kill for certain in the middle of each kind of write, whatever the machine's speed
    what = ["", "checkpoint", "log"][kills] if kills < 3 else ""
    os.environ["BISLS_TEST_HANG"] = what
    pid = start(folder / "killed", True)
    if what:
        while not (folder / what).exists():
            time.sleep(0.001)
    else:
        time.sleep(dice.uniform(0.03, 0.25) * (1 + kills / 10))  # longer and longer, so that it ends on a slow machine too
    done, status = os.waitpid(pid, os.WNOHANG)
    if done:
        assert status == 0, status
        assert kills > 2, "the machine is too fast for this test: let it take more steps"
        break
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    kills += 1
    torn += bool(list(folder.glob(".run.pt.*.tmp")))
    logs += bool(list(folder.glob(".killed.jsonl.*.tmp")))
    assert kills < 60
print(json.dumps([kills, torn, logs]))
'''


@pytest.mark.slow
def test_a_run_that_is_killed_again_and_again_is_the_run(tmp_path):
    script = tmp_path / "killed.py"
    script.write_text(KILLED.format(tests=str(Path(__file__).parent)))
    done = subprocess.run([sys.executable, str(script), str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    kills, torn, logs = json.loads(done.stdout)
    assert kills >= 3
    assert torn >= 1  # a kill fell into a write of the checkpoint
    assert logs >= 1  # and one into that of the log
    whole, killed = (torch.load(tmp_path / name, weights_only=True) for name in ("whole", "killed"))
    assert torch.equal(whole[0], killed[0])
    assert torch.equal(whole[1], killed[1])
    assert whole[2] == killed[2]
    assert (tmp_path / "whole.jsonl").read_text() == (tmp_path / "killed.jsonl").read_text()
    assert len(History.load(tmp_path / "killed.jsonl")) == 30
    assert not list(tmp_path.glob("*.tmp"))


@pytest.fixture(autouse=True)
def ctrl_c():
    """SIGINT as a terminal has it: a job started in the background is born ignoring it, and fit respects that."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_finishes_the_iteration_and_leaves_a_checkpoint(number, tmp_path, caplog):
    def interrupt(record, state):
        if record.k == 2:
            os.kill(os.getpid(), number)

    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    torch.manual_seed(1)
    whole = solver()
    expected = fit(whole, KINDS["loader"](), KINDS["loader"](), 6, False)
    torch.manual_seed(1)
    made = solver()
    with pytest.raises(
        KeyboardInterrupt, match=r"at k = 3 of 6; go on with fit\(..., checkpoint='.*run.pt', resume=True"
    ):
        fit(made, KINDS["loader"](), KINDS["loader"](), 6, False, [interrupt], tmp_path / "run.pt")
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers
    assert made.k == 3
    again = solver()
    history = fit(again, KINDS["loader"](), KINDS["loader"](), 6, False, checkpoint=tmp_path / "run.pt", resume=True)
    assert outcome(again, history)[:3] == outcome(whole, expected)[:3]


def test_a_second_interrupt_stops_at_once_with_the_parameters_of_the_last_iteration(tmp_path):
    made, points = solver(), []

    def batch():
        if made.k == 2:
            points.append(made.problem.y.read())
            os.kill(os.getpid(), signal.SIGINT)
        return table()

    def loss(rows):
        if points and len(points) < 9:
            points.append(None)
            if len(points) == 9:
                os.kill(os.getpid(), signal.SIGINT)
        return lower(rows)

    lower, made.problem.lower_loss = made.problem.lower_loss, loss
    with pytest.raises(KeyboardInterrupt) as caught:
        fit(made, batch, table(), 6, False, checkpoint=Checkpoint(tmp_path / "run.pt", every=1))
    assert not isinstance(caught.value, Interrupted)
    assert torch.equal(made.problem.y.read(), points[0])
    again = solver()
    assert len(fit(again, lambda: table(), table(), 6, False, checkpoint=tmp_path / "run.pt", resume=True)) == 6


def test_an_interrupt_carries_the_history_and_a_thread_can_run_too():
    with pytest.raises(Interrupted) as caught:
        fit(solver(), table(), table(), 6, False, [lambda record, state: os.kill(os.getpid(), signal.SIGINT)])
    assert len(caught.value.history) == 1
    found = []
    thread = threading.Thread(target=lambda: found.append(fit(solver(), table(), table(), 2, False)))
    thread.start()
    thread.join()
    assert len(found[0]) == 2


def state_of(made):
    return json.dumps([made.problem.x.read().tolist(), made.problem.y.read().tolist(), str(made.state_dict())])


def saved(path, **options):
    torch.manual_seed(1)
    fit(solver(), KINDS["loader"](), table(), 3, False, checkpoint=Checkpoint(path, **options))
    return torch.load(path, weights_only=True)


REFUSED = {
    "truncated": (
        lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
        "not a whole checkpoint",
    ),
    "cut at the end": (lambda path: path.write_bytes(path.read_bytes()[:-30]), "not a whole checkpoint of bisls"),
    "empty": (
        lambda path: path.write_bytes(b""),
        "not a whole checkpoint of bisls .*delete it to start from the begin",
    ),
    "text": (lambda path: path.write_text("hello"), "not a whole checkpoint of bisls"),
    "foreign": (lambda path: torch.save({"model": torch.ones(2)}, path), "not a whole checkpoint of bisls .KeyError"),
    "code": (lambda path: torch.save({"format": SimpleNamespace()}, path), "not a whole checkpoint .*UnpicklingError"),
    "version": (
        lambda path: torch.save({**torch.load(path, weights_only=True), "format": 99}, path),
        "its format is 99, this version of bisls reads 2; resume with the version that wrote it",
    ),
}


@pytest.mark.parametrize("how", REFUSED)
def test_a_damaged_checkpoint_is_refused_and_changes_nothing(how, tmp_path):
    path = tmp_path / "run.pt"
    saved(path)
    damage, message = REFUSED[how]
    damage(path)
    made = solver()
    before, moment = state_of(made), str(random_state())
    with pytest.raises(CheckpointError, match=message):
        fit(made, KINDS["loader"](), table(), 6, False, checkpoint=path, resume=True)
    assert (state_of(made), str(random_state())) == (before, moment)


OTHERS = {
    "problem": (
        lambda: Alternating(problem(6), lower_iters=2),
        KINDS["loader"],
        r"is of another problem: it has .*float64\[4\].*, here it is .*float64\[6\].*; make the problem as it was made",
    ),
    "method": (
        lambda: solver(Alternating),
        KINDS["loader"],
        r"another method .*it has Solver\(.*rule=Armijo\(.*here it is Solver\(.*rule=Constant\(.*make the solver as it was made",
    ),
    "lower_iters": (lambda: solver(lower_iters=5), KINDS["loader"], r"lower_iters=2.*here it is.*lower_iters=5"),
    "kind of data": (
        solver,
        lambda: KINDS["generator"](),
        r"`fit\(upper_data=generator\(...\)\)`: .*is that of a loader, these data are an iterator",
    ),
    "batch size": (
        solver,
        lambda: DataLoader(TensorDataset(*table()), 5, shuffle=True),
        r"an epoch had 5 batches when the place was saved, and has 8; pass the same data, batch_size and drop_last",
    ),
    "generator": (
        solver,
        lambda: DataLoader(TensorDataset(*table()), 8, shuffle=True, generator=torch.Generator()),
        r"the loader had 0 generators of its own when its place was saved, and has 1",
    ),
}


@pytest.mark.parametrize("what", OTHERS)
def test_a_checkpoint_of_another_run_is_refused_and_changes_nothing(what, tmp_path):
    saved(tmp_path / "run.pt")
    make, data, message = OTHERS[what]
    made = make()
    before, moment = state_of(made), str(random_state())
    with pytest.raises(CheckpointError, match=message):
        fit(made, data(), table(), 6, False, checkpoint=tmp_path / "run.pt", resume=True)
    assert (state_of(made), str(random_state())) == (before, moment)


def test_extra_objects_are_saved_and_a_failure_in_one_of_them_takes_all_back(tmp_path):
    path, net = tmp_path / "run.pt", nn.BatchNorm1d(3)
    net(torch.randn(8, 3))
    mean = net.running_mean.clone()
    saved(path, extra={"net": net})
    other, made = nn.BatchNorm1d(3), solver()
    fit(made, KINDS["loader"](), table(), 3, False, checkpoint=Checkpoint(path, extra={"net": other}), resume=True)
    assert torch.equal(other.running_mean, mean)
    made, wrong = solver(), nn.BatchNorm1d(5)
    before = state_of(made)
    with pytest.raises(CheckpointError, match=r"cannot be resumed here: Error.* loading state_dict for BatchNorm1d"):
        fit(made, KINDS["loader"](), table(), 3, False, checkpoint=Checkpoint(path, extra={"net": wrong}), resume=True)
    assert state_of(made) == before
    with pytest.raises(
        CheckpointError, match=r"has extra=\['net'\], `Checkpoint\(extra=...\)` has \[\]; pass the same"
    ):
        fit(made, KINDS["loader"](), table(), 3, False, checkpoint=path, resume=True)


def test_declared_buffers_are_saved(tmp_path):
    def make():
        own = problem()
        counter = torch.zeros(1)

        def loss(batch, lower=own.lower_loss):
            counter.add_(1)
            return lower(batch) + 0 * counter.sum()

        return BiSLS(
            bisls.Bilevel(own.upper_loss, loss, own.x.tensors, own.y.tensors, buffers=[counter]), lower_iters=2
        )

    first, second = make(), make()
    fit(first, table(), table(), 3, False, checkpoint=tmp_path / "run.pt")
    fit(second, table(), table(), 3, False, checkpoint=tmp_path / "run.pt", resume=True)
    assert first.problem.buffers[0].item() == second.problem.buffers[0].item() > 0


def test_no_run_is_lost_and_a_missing_file_is_a_beginning(tmp_path, caplog):
    path = tmp_path / "new" / "run.pt"
    (tmp_path / "new").mkdir()
    left = path.with_name(".run.pt.123.tmp")
    left.write_bytes(b"half a file")
    with caplog.at_level(logging.INFO):
        fit(solver(), table(), table(), 2, False, checkpoint=path, resume=True)
    assert "the run starts from its beginning" in caplog.text
    assert not left.exists()
    with pytest.raises(
        ValueError, match=r"resume=False\)`: the file exists; pass resume=True to go on from it, or delete it"
    ):
        fit(solver(), table(), table(), 2, False, checkpoint=path)
    with pytest.raises(ValueError, match="this is a folder; name a file in it"):
        fit(solver(), table(), table(), 2, False, checkpoint=tmp_path)


def test_a_slice_is_saved_without_what_it_is_a_slice_of(tmp_path):
    big = torch.randn(200_000, 4, dtype=torch.float64)
    batches = itertools.cycle([(big[:8], big[:8, 0]), (big[8:16], big[8:16, 0])])
    fit(solver(), batches, table(), 2, False, checkpoint=tmp_path / "run.pt")
    assert (tmp_path / "run.pt").stat().st_size < 200_000


def test_a_state_that_could_not_be_read_back_is_refused_when_it_is_saved(tmp_path):
    class Odd(Callback):
        def state_dict(self):
            return {"when": {"now": object()}}

        def load_state_dict(self, state):
            pass

    with pytest.raises(
        ValueError, match=r"cannot hold state\['callbacks'\]\['Odd 1'\]\['when'\]\['now'\], which is a object"
    ):
        fit(solver(), table(), table(), 2, False, [Odd()], tmp_path / "run.pt")


def test_a_full_disk_does_not_end_the_run_before_its_end(tmp_path, monkeypatch, caplog):
    def full(*_):
        raise OSError(28, "No space left on device")

    replace = os.replace
    monkeypatch.setattr(os, "replace", full)

    def freed(record, state):
        if record.k == 2:
            monkeypatch.setattr(os, "replace", replace)

    history = fit(solver(), table(), table(), 4, False, [freed], Checkpoint(tmp_path / "run.pt", every=1))
    assert caplog.text.count("could not be written: OSError: [Errno 28] No space left on device") == 1
    assert "k = 3: the checkpoint is written again, after 2 that could not be" in caplog.text
    assert [path.name for path in tmp_path.iterdir()] == ["run.pt"]
    assert history.unsaved == ""
    monkeypatch.setattr(os, "replace", full)
    history = fit(solver(), table(), table(), 6, False, checkpoint=tmp_path / "run.pt", resume=True)
    assert len(history) == 6
    assert "could not be written: OSError: [Errno 28]" in history.unsaved
    assert "unsaved" in repr(history)
    assert "the run ends at k = 6 unsaved" in caplog.text
    assert caplog.text.rstrip().endswith("the file is of k = 4")


def test_checkpoints_also_come_by_the_clock(tmp_path):
    seen = []

    def look(record, state):
        seen.append((tmp_path / "run.pt").exists())

    fit(solver(), table(), table(), 3, False, [look], Checkpoint(tmp_path / "run.pt", every=1000, seconds=1e-6))
    assert seen == [False, True, True]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": -1}, r"`fit\(steps=-1\)`: steps must be a whole number, at least 0"),
        ({"steps": 2.5}, r"`fit\(steps=2.5\)`: steps must be a whole number"),
        ({"on_failure": "stop"}, r"`fit\(on_failure='stop'\)`: on_failure must be \"warn\", \"raise\" or \"ignore\""),
        ({"resume": True}, r"`fit\(resume=True\)`: resume needs to know what to resume from: pass checkpoint=path"),
        ({"resume": "run.pt"}, r"`fit\(resume='run.pt'\)`: resume must be True or False; the path is checkpoint=..."),
        ({"checkpoint": 3}, r"`fit\(checkpoint=3\)`: checkpoint must be a path or a Checkpoint"),
        ({"callbacks": Evaluate(lambda: 0.0)}, r"callbacks must be a list of callbacks: \[callback\]"),
        ({"callbacks": [EarlyStopping]}, r"`fit\(callbacks=\[EarlyStopping\]\)`: this is a class; pass an instance"),
        ({"callbacks": [3]}, r"`fit\(callbacks=\[3\]\)`: a callback has at least one of start\(state\), step\(record"),
    ],
)
def test_arguments_that_cannot_be_used_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        fit(solver(), table(), table(), progress=False, **options)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: fit(BiSLS), r"`fit\(solver=BiSLS\)`: this is a class; pass an instance: BiSLS\(problem\)"),
        (
            lambda: fit(problem()),
            r"solver must be a solver, such as BiSLS\(problem\); a Bilevel has no problem, lower_iters",
        ),
        (lambda: Checkpoint("run.pt", every=0), r"`Checkpoint\(every=0\)`: every must be a whole number of iterations"),
        (
            lambda: Checkpoint("run.pt", seconds=0),
            r"`Checkpoint\(seconds=0\)`: seconds must be greater than 0, or None",
        ),
        (lambda: Checkpoint("run.pt", extra={"a": 3}), r"extra must be a dict of objects that have state_dict\(\)"),
        (lambda: Checkpoint(""), r"`Checkpoint\(path=''\)`: path must name a file"),
        (lambda: EarlyStopping(0), r"`EarlyStopping\(patience=0\)`: patience must be a whole number, at least 1"),
        (lambda: EarlyStopping(min_delta=-1), r"min_delta must be at least 0"),
        (
            lambda: EarlyStopping(on="loss"),
            r"`EarlyStopping\(on='loss'\)`: on must be a function .* one of upper_value, low",
        ),
        (lambda: Evaluate(3), r"`Evaluate\(function=3\)`: function must be callable without arguments"),
        (lambda: Evaluate(lambda: 0.0, every=0), r"`Evaluate\(every=0\)`: every must be a whole number, at least 1"),
        (lambda: JSONLines(""), r"`JSONLines\(path=''\)`: path must name a file"),
    ],
)
def test_parts_that_cannot_be_used_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_no_steps_are_a_run_too_and_a_second_run_goes_on():
    made = solver()
    assert len(fit(made, table(), table(), 0, False)) == 0
    assert fit(made, table(), table(), 2, False)["k"].tolist() == [0, 1]
    assert fit(made, table(), table(), 2, False)["k"].tolist() == [2, 3]


def test_evaluation_leaves_no_trace_and_is_kept(tmp_path):
    net = nn.BatchNorm1d(4).double()

    def evaluate():
        np.random.random()  # noqa: NPY002
        net(table()[0])
        return {"draw": torch.rand(1).item(), "mean": net.running_mean.abs().sum()}

    results = []
    for callbacks in ([], [Evaluate(evaluate, every=2), Evaluate(lambda: 1.0, every=4, name="one")]):
        torch.manual_seed(2)
        np.random.seed(2)  # noqa: NPY002
        random.seed(2)
        made = solver()
        history = fit(
            made,
            KINDS["loader"](),
            KINDS["callable"](),
            5,
            False,
            [*callbacks, JSONLines(tmp_path / f"{len(callbacks)}")],
        )
        results.append((outcome(made, history), history))
    (plain, _), (watched, history) = results
    assert plain[:3] == watched[:3]
    assert plain[4:] == watched[4:]
    assert net.running_mean.abs().sum() == 0
    assert [sorted(row) for row in history.evaluations] == [
        ["draw", "k", "mean"],
        ["draw", "k", "mean", "one"],
        ["draw", "k", "mean", "one"],
    ]
    assert [row["k"] for row in history.evaluations] == [1, 3, 4]
    loaded = History.load(tmp_path / "2")
    assert loaded.evaluations == history.evaluations
    with pytest.raises(ValueError, match=r"a must be a number, got list; return float\(...\)"):
        fit(solver(), table(), table(), 2, False, [Evaluate(lambda: {"a": []})])


def test_early_stopping_stops_and_stays_stopped(tmp_path, caplog):
    values = iter((3.0, 2.0, float("nan"), 2.5, 1.0))

    def stopping():
        return EarlyStopping(patience=2, on=lambda: next(values))

    with caplog.at_level(logging.INFO):
        history = fit(solver(), table(), table(), 20, False, [stopping()], tmp_path / "run.pt")
    assert len(history) == 4
    assert "stopped at k = 4: no improvement on 2 (k = 1) in 2 looks" in caplog.text
    assert len(fit(solver(), table(), table(), 20, False, [stopping()], tmp_path / "run.pt", True)) == 4
    assert len(fit(solver(), table(), table(), 6, False, [], tmp_path / "run.pt", True)) == 6
    assert len(fit(solver(), table(), table(), 20, False, [EarlyStopping(1, 1e9, on="alpha", every=3)])) == 6


def test_a_callback_that_raises_does_not_lose_the_run(tmp_path):
    ended = []

    class Last(Callback):
        def end(self, history):
            ended.append(len(history))

    def fail(record, state):
        if record.k == 4 and not ended:
            raise ZeroDivisionError("in a callback")

    def go(callbacks, **options):
        torch.manual_seed(1)
        made = solver()
        return outcome(made, fit(made, KINDS["loader"](), table(), 7, False, callbacks, **options))[:3]

    whole = go([JSONLines(tmp_path / "whole.jsonl")])
    callbacks = [fail, JSONLines(tmp_path / "run.jsonl"), Last()]
    with pytest.raises(ZeroDivisionError, match="in a callback"):
        go(callbacks, checkpoint=tmp_path / "run.pt")
    assert ended == [5]
    logged = History.load(tmp_path / "run.jsonl")
    assert len(logged) == 5  # though the callback before it raised
    assert logged.stopped == "ZeroDivisionError: in a callback"
    assert go(callbacks, checkpoint=tmp_path / "run.pt", resume=True) == whole
    assert (tmp_path / "run.jsonl").read_text() == (tmp_path / "whole.jsonl").read_text()


def test_json_lines_do_not_mix_runs_and_forgive_a_cut_line(tmp_path):
    path = tmp_path / "log" / "run.jsonl"
    made = solver()
    fit(made, table(), table(), 2, False, [JSONLines(path)])
    with path.open("a") as file:
        file.write('{"k": 2, "upper_v')
    fit(made, table(), table(), 2, False, [JSONLines(path)])  # goes on: the same run
    history = History.load(path)
    assert history["k"].tolist() == [0, 1, 2, 3]
    assert all(json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines())
    with pytest.raises(
        ValueError, match=r"the file has records from iteration 0 on, of another run; give another path"
    ):
        fit(solver(), table(), table(), 2, False, [JSONLines(path)])
    path.write_text("nonsense\n")
    with pytest.raises(
        ValueError, match=r"line 1 is not a record .*pass a file that history.save\(path\) or JSONLines\(path\) wrote"
    ):
        History.load(path)


def test_records_survive_the_way_through_a_line(tmp_path):
    odd = Record(3, float("inf"), float("nan"), 0.1, -0.0, 1, 2, 1e-300, float("nan"), status=Status.CAPPED)
    path = tmp_path / "run.jsonl"
    path.write_text("\n".join(History([odd], [{"k": 3, "a": float("-inf")}]).to_lines()))
    loaded = History.load(path)
    assert repr(loaded.records) == repr([odd])
    assert loaded.evaluations == [{"k": 3, "a": float("-inf")}]


def test_tensorboard_is_asked_for_by_name_and_fed(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(
        ImportError, match=r"`TensorBoard\('logs'\)` needs the package tensorboard: pip install 'bisls\[tens"
    ):
        TensorBoard("logs")
    points = []
    writer = SimpleNamespace(add_scalar=lambda *point: points.append(point), close=lambda: points.append("closed"))
    fake = SimpleNamespace(SummaryWriter=lambda folder, purge_step: points.append((folder, purge_step)) or writer)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", fake)
    fit(solver(), table(), table(), 2, False, [Evaluate(lambda: 2.0, name="two"), TensorBoard("logs")])
    assert points[0] == ("logs", 0)
    assert ("evaluation/two", 2.0, 1) in points
    assert {point[0] for point in points if point[-1] == 1} >= {
        "bisls/alpha",
        "bisls/upper_value",
        "bisls/lower_checks",
    }
    assert points[-1] == "closed"


def poisoned(when):
    """Batches of which some are not numbers."""

    def batches():
        for k in itertools.count():
            features, target = table()
            yield (features * float("nan"), target) if k in when else (features, target)

    return batches()


def test_failures_are_warned_about_once_and_counted(caplog):
    history = fit(solver(Alternating), poisoned({1, 2, 4}), table(), 6, False)
    assert [record.upper_status.failed for record in history] == [False, True, True, False, True, False]
    texts = [record.getMessage() for record in caplog.records]
    assert [text for text in texts if "upper level: NON_FINITE: a loss or gradient is NaN" in text] == texts[:1]
    assert texts[0].startswith("k = 1: ")
    assert texts[-1].startswith("in 6 iterations: 3 times upper level NON_FINITE")
    caplog.clear()
    fit(solver(Alternating), poisoned({1, 2, 4}), table(), 6, False, on_failure="ignore")
    assert not caplog.records


def test_failures_can_raise_and_the_checkpoint_is_written_first(tmp_path):
    def go(**options):
        return fit(solver(Alternating), poisoned({2}), table(), 6, False, checkpoint=tmp_path / "run.pt", **options)

    message = r"iteration 2 failed \(upper level.*\): upper level: NON_FINITE: a loss or gradient is NaN"
    with pytest.raises(FitError, match=message) as caught:
        go(on_failure="raise")
    assert (caught.value.record.k, len(caught.value.history)) == (2, 3)
    assert caught.value.level.startswith("upper level")
    assert "Look for log(0)" in caught.value.advice
    assert len(go(resume=True, on_failure="raise")) == 6


def test_an_error_in_a_loss_says_where_the_run_is(tmp_path):
    made = solver()
    upper = made.problem.upper_loss
    made.problem.upper_loss = lambda batch: upper(batch) if made.k < 3 else 1 / 0
    with pytest.raises(ZeroDivisionError) as caught:
        fit(made, table(), table(), 6, False, checkpoint=Checkpoint(tmp_path / "run.pt", every=2))
    assert caught.value.__notes__ == [f"in iteration 3 of fit, the checkpoint {str(tmp_path / 'run.pt')!r} is of k = 2"]


def test_progress_is_a_bar_on_a_terminal_and_a_few_lines_of_log_elsewhere(capsys, monkeypatch, caplog):
    with caplog.at_level(logging.INFO):
        fit(solver(), table(), table(), 3)
        assert capsys.readouterr() == ("", "")
        assert not caplog.records
        monkeypatch.setattr(sys.modules["bisls.fit"], "Progress", partial(Progress, every=0.0))
        fit(solver(), table(), table(), 4, callbacks=[lambda record, state: state.shown.update(accuracy=0.5)])
        monkeypatch.undo()
    assert "1/4 iterations  f " in caplog.text
    assert "accuracy 0.5" in caplog.text
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setenv("TERM", "xterm")
    fit(solver(), table(), table(), 3, callbacks=[Evaluate(lambda: 0.25, name="accuracy")])
    out, err = capsys.readouterr()
    assert out == ""
    for text in ("3/3", "alpha", "beta", "checks", "accuracy 0.25"):
        assert text in err
    monkeypatch.setitem(sys.modules, "rich.console", None)
    fit(solver(), table(), table(), 2)
    assert capsys.readouterr() == ("", "")


def test_histories_are_plotted_and_framed(tmp_path, monkeypatch):
    history = fit(solver(), table(), table(), 3, False, [Evaluate(lambda: 1.0)])
    history.append(Record(3, -1.0, 0.5, 0.0, 0.0, 0, 0, 0.1, 0.1))
    figure = history.plot(tmp_path / "run.png")
    assert (tmp_path / "run.png").stat().st_size > 1000
    losses, steps, checks = figure.axes
    assert [axes.get_yscale() for axes in (losses, steps, checks)] == ["linear", "log", "linear"]
    assert np.isnan(steps.lines[0].get_ydata()[-1])  # no step was taken
    assert checks.get_xlabel() == "k, outer iteration"
    assert all(axes.get_ylabel() and axes.get_legend() for axes in figure.axes)
    assert History().plot().axes
    History([Record(0, 1.0, 1e250, 0.1, 0.1, 1, 1, 1.0, 0.1)]).plot(tmp_path / "far.png")
    assert repr(history) == "History(4 records, last upper loss -1)"
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match=r"`History.to_frame\(\)` needs pandas: pip install pandas"):
        history.to_frame()
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"`History.plot\(\)` needs matplotlib: pip install 'bisls\[cli\]'"):
        history.plot()


def share(rank: int):
    """The rows of one rank, in an order that rank alone knows."""
    features, target = table()
    return DataLoader(TensorDataset(features[rank::2], target[rank::2]), 5, shuffle=True)


def work(rank: int, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)

    def go(name, steps, seed, callbacks=(), **options):
        torch.manual_seed(seed)
        made = solver()
        path = Path(folder) / name if name else None
        return outcome(made, fit(made, share(rank), share(rank), steps, False, callbacks, path, **options))[:5]

    def on_one_rank(record, state):
        if record.k == 1 and rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    whole = go(None, 5, seed=rank)
    go("run.pt", 3, seed=rank)
    again = go("run.pt", 5, seed=50 + rank, resume=True)
    try:
        go("stopped.pt", 5, seed=rank, callbacks=[on_one_rank])
        stopped = None
    except KeyboardInterrupt as interrupt:
        stopped = str(interrupt)
    after = go("stopped.pt", 5, seed=9, resume=True)
    (Path(folder) / f"rank {rank}").write_text(json.dumps([whole, again, stopped, after]))
    time.sleep(0.1)  # before torch 2.8, leaving a group may lock up while a thread of it still holds a result
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_processes_share_one_file_and_resume_exactly(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); from test_fit import work; work"
    commands = [[sys.executable, "-c", f"{code}({rank}, {port}, {str(tmp_path)!r})"] for rank in range(2)]
    workers = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for command in commands]
    for worker in workers:
        _, err = worker.communicate(timeout=100)
        assert worker.returncode == 0, err
    answers = [json.loads((tmp_path / f"rank {rank}").read_text()) for rank in range(2)]
    for whole, again, stopped, after in answers:
        assert again == whole  # parameters, records, and the random state of this rank
        assert after == whole
        assert stopped is not None
        assert "at k = 2 of 5" in stopped
    assert answers[0][0][:3] == answers[1][0][:3]
    assert answers[0][0][4] != answers[1][0][4]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank 0", "rank 1", "run.pt", "stopped.pt"]
    with pytest.raises(CheckpointError, match=r"was written by 2 processes, here there are 1; .*start as many as then"):
        fit(solver(), share(0), share(0), 7, False, checkpoint=tmp_path / "run.pt", resume=True)
