"""What a run is fed: arrays and frames, which batches the hypergradient sees, and the files and bars around a run."""

from __future__ import annotations

import logging
import os
import stat
import sys
from collections import namedtuple
from dataclasses import field, make_dataclass

import numpy as np
import pytest
import torch

import bisls
from bisls._files import remove_unfinished, replacing, write_whole
from bisls.checkpoint import Checkpoint, CheckpointError
from bisls.feed import feed
from bisls.fit import fit
from bisls.methods import BiSLS
from bisls.progress import Progress, Transfer
from bisls.steps import Constant
from bisls.steps.base import Step, StepRule

pytestmark = pytest.mark.slow  # `make quick` leaves it out

ROWS = np.array([[1.0, 2.0], [0.5, -1.0], [3.0, 0.25], [-2.0, 1.0]])
TARGET = np.array([2.0, -1.0, 0.5, 3.0])


def ridge(dtype=torch.float64):
    x = torch.full((2,), -1.0, dtype=dtype, requires_grad=True)
    y = torch.zeros(2, dtype=dtype, requires_grad=True)

    def loss(batch):
        features, target = batch
        assert isinstance(features, torch.Tensor)
        return ((features @ y - target) ** 2).mean()

    return bisls.Bilevel(loss, lambda batch: loss(batch) + (x.exp() * y**2).sum(), [x], [y])


def end(problem):
    return problem.x.read().tolist() + problem.y.read().tolist()


# --- arrays and frames


def test_arrays_are_data():
    expected, found = ridge(), ridge()
    tensors = (torch.as_tensor(ROWS), torch.as_tensor(TARGET))
    fit(BiSLS(expected), tensors, tensors, 5, False)
    fit(BiSLS(found), (ROWS, TARGET), (ROWS, TARGET), 5, False, step_data=None)
    assert end(found) == end(expected)


Pair = namedtuple("Pair", "features target")


def test_arrays_become_tensors_once_and_share_their_memory():
    own = feed(ROWS, "upper_data")
    batch = own.take()
    assert own.whole
    assert batch is own.take()
    assert batch.dtype == torch.float64
    assert batch.data_ptr() == ROWS.ctypes.data
    nested = feed({"a": Pair(ROWS.astype(np.float32), TARGET), "b": [np.float32(2.5), 3, "name", None]}, "x").take()
    assert isinstance(nested["a"], Pair)
    assert nested["a"].features.dtype == torch.float32
    assert nested["b"][0].item() == 2.5
    assert nested["b"][1:] == [3, "name", None]


def test_arrays_that_torch_cannot_share_are_copied():
    fixed = ROWS.copy()
    fixed.setflags(write=False)  # torch would warn, and warnings are errors here
    assert torch.equal(feed(fixed, "x").take(), torch.tensor(ROWS.tolist(), dtype=torch.float64))
    assert torch.equal(feed(TARGET[::-1], "x").take(), torch.tensor(TARGET[::-1].tolist(), dtype=torch.float64))


def test_frames_and_series_of_pandas_are_data():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(ROWS, columns=["a", "b"])
    expected, found = ridge(), ridge()
    fit(BiSLS(expected), (ROWS, TARGET), (ROWS, TARGET), 5, False)
    data = (frame, pandas.Series(TARGET))
    fit(BiSLS(found), data, data, 5, False)
    assert end(found) == end(expected)
    assert feed(frame, "upper_data").whole  # not an iterator over the names of its columns
    frame["c"] = ["some", "text", "in", "it"]
    with pytest.raises(
        ValueError, match=r"`fit\(upper_data=DataFrame\(...\)\)`: this DataFrame cannot be read as numbers.*as_tensor"
    ):
        fit(BiSLS(ridge()), frame, None, 1, False)


def test_frames_of_polars_are_data():
    polars = pytest.importorskip("polars")
    frame = polars.DataFrame({"a": ROWS[:, 0], "b": ROWS[:, 1]})
    assert torch.equal(feed(frame, "upper_data").take(), torch.as_tensor(ROWS))
    assert torch.equal(feed(frame["a"], "upper_data").take(), torch.as_tensor(ROWS[:, 0]))


class Foreign:
    """A frame of a library that nobody has heard of."""

    def __array__(self, dtype=None, copy=None):
        return ROWS

    def __iter__(self):
        return iter(["a", "b"])


def test_any_frame_that_numpy_can_read_is_data():
    assert torch.equal(feed(Foreign(), "upper_data").take(), torch.as_tensor(ROWS))


def test_batches_of_an_iterator_are_left_as_they_are():
    assert feed(iter([ROWS]), "upper_data").take() is ROWS


# --- which batches


@pytest.mark.parametrize("lower_iters", [None, 4, 1])
def test_each_factor_of_a_stochastic_neumann_product_sees_a_fresh_batch(lower_iters):
    seen, used = [], []
    x, y = torch.tensor([0.5], requires_grad=True), torch.tensor([1.0, 2.0], requires_grad=True)

    def lower(batch):
        used.append(int(batch))
        return (1.0 + 0.01 * batch) * ((y - x) ** 2).sum()

    def batches():
        return torch.tensor(float(len(seen) - 1)) if seen.append(0) is None else None

    problem = bisls.Bilevel(lambda _: ((y - 3.0) ** 2).sum(), lower, [x], [y])
    options = {} if lower_iters is None else {"lower_iters": lower_iters}
    solver = BiSLS.paper(problem, hypergrad=bisls.StochasticNeumann(terms=4, smoothness=3.0), **options)
    asked = []
    graph = solver.oracle.lower_graph

    def watched(batch, *rest, **more):
        asked.append(int(batch))
        return graph(batch, *rest, **more)

    solver.oracle.lower_graph = watched
    torch.manual_seed(3)
    several, T = 0, solver.lower_iters
    for k in range(6):
        del asked[:]
        fit(solver, None, batches, 1, False)
        assert len(seen) == (k + 1) * (T + 4)  # T batches an iteration and one for each factor, whoever uses them
        factors = list(dict.fromkeys(asked))
        newest = (k + 1) * (T + 4) - 1
        assert len(factors) <= 4  # none of those that y was trained on
        assert factors == list(range(newest, newest - len(factors), -1))  # the newest first, each once
        several += len(factors) > 1
    assert several >= 3  # M is 0 in one of four


# --- a checkpoint knows a method by what is not a default


def rule(**options):
    """A step rule of a version of its own: the class is made anew, with more settings or fewer."""

    def choose(self, line, memory):
        return Step(self.step, memory.later())

    fields = [
        ("step", float, field(default=0.1)),
        *((name, float, field(default=own)) for name, own in options.items()),
    ]
    return make_dataclass("Own", fields, bases=(StepRule,), namespace={"choose": choose}, frozen=True)


def run(path, own, steps, **options):
    problem = ridge()
    solver = bisls.Alternating(problem, upper_step=own, lower_step=Constant(0.1), **options)
    return fit(solver, (ROWS, TARGET), (ROWS, TARGET), steps, False, checkpoint=path, resume=True), problem


def test_a_setting_that_comes_new_with_its_default_keeps_old_checkpoints(tmp_path):
    whole, at = run(tmp_path / "whole.pt", rule()(0.2), 6)
    path = tmp_path / "run.pt"
    run(path, rule()(0.2), 3)
    resumed, found = run(path, rule(patience=7.0)(0.2), 6)
    assert [record.to_dict() for record in resumed] == [record.to_dict() for record in whole]
    assert end(found) == end(at)


@pytest.mark.parametrize(
    ("own", "options", "name"),
    [
        (rule()(0.3), {}, r"step=0.2.*here it is .*step=0.3"),
        (rule(patience=7.0)(0.2, 8.0), {}, r"here it is .*patience=8.0"),
        (rule()(0.2), {"lower_iters": 3}, r"here it is .*lower_iters=3"),
        (rule()(0.2), {"lower_tol": 0.5}, r"here it is .*tol=0.5"),
    ],
)
def test_a_setting_that_differs_is_refused_by_name(own, options, name, tmp_path):
    path = tmp_path / "run.pt"
    run(path, rule()(0.2), 3)
    with pytest.raises(CheckpointError, match=f"is of another method .*{name}"):
        run(path, own, 6, **options)


def test_the_state_of_another_method_is_refused():
    solvers = [bisls.Alternating(ridge(), upper_step=Constant(step), lower_step=Constant(0.1)) for step in (0.1, 0.2)]
    fit(solvers[0], (ROWS, TARGET), (ROWS, TARGET), 2, False)
    with pytest.raises(ValueError, match=r"the state is of another method, .*step=0.1.*; this one is .*step=0.2"):
        solvers[1].load_state_dict(solvers[0].state_dict())
    assert solvers[1].k == 0


def test_a_solver_without_an_identity_is_known_by_its_repr(tmp_path):
    class Wrapped:
        """A solver of one's own around another."""

        def __init__(self, name):
            self.own, self.name = BiSLS(ridge()), name
            self.problem, self.lower_iters = self.own.problem, self.own.lower_iters
            self.step, self.state_dict, self.load_state_dict = (
                self.own.step,
                self.own.state_dict,
                self.own.load_state_dict,
            )

        @property
        def k(self):
            return self.own.k

        def __repr__(self):
            return f"Wrapped({self.name})"

    path, data = tmp_path / "run.pt", (ROWS, TARGET)
    fit(Wrapped("a"), data, data, 2, False, checkpoint=path)
    assert len(fit(Wrapped("a"), data, data, 4, False, checkpoint=path, resume=True)) == 4
    with pytest.raises(CheckpointError, match=r"it has Wrapped\(a\), here it is Wrapped\(b\)"):
        fit(Wrapped("b"), data, data, 4, False, checkpoint=path, resume=True)


# --- files


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_permissions_are_those_of_the_old_file_or_of_the_umask(tmp_path):
    path = tmp_path / "a"
    before = os.umask(0o027)
    try:
        write_whole(path, "one")
        assert mode(path) == 0o640
        path.chmod(0o604)
        write_whole(path, "two")
    finally:
        os.umask(before)
    assert mode(path) == 0o604
    assert path.read_text() == "two"


def test_a_link_stays_a_link(tmp_path):
    (tmp_path / "big disk").mkdir()
    target, link = tmp_path / "big disk" / "run.pt", tmp_path / "run.pt"
    link.symlink_to(target)
    for _ in range(2):  # one that points to nothing yet, and to a file
        fit(BiSLS(ridge()), (ROWS, TARGET), (ROWS, TARGET), 2, False, checkpoint=Checkpoint(link), resume=True)
        assert link.is_symlink()
        assert target.is_file()
        assert not target.is_symlink()
    bisls.History().save(link)
    assert link.is_symlink()
    assert target.read_text() == ""


def test_a_device_is_written_to():
    write_whole("/dev/null", "nothing")
    assert not os.path.isfile("/dev/null")


def test_a_block_that_raises_leaves_the_old_file(tmp_path):
    path = tmp_path / "a"
    write_whole(path, "old")

    def interrupted():
        with replacing(path) as file:
            file.write(b"new")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["a"]
    (tmp_path / ".a.77-abc.tmp").write_text("left by a kill")
    (tmp_path / ".ab.77-abc.tmp").write_text("of another file")
    remove_unfinished(path)
    assert sorted(os.listdir(tmp_path)) == [".ab.77-abc.tmp", "a"]


# --- bars


def test_a_bar_counts_in_the_log(caplog):
    with caplog.at_level(logging.INFO), Progress(True, 4, what="runs", every=0.0) as bar:
        bar.advance("first")
        bar.advance()
        bar.reach(4, "last")
        bar.begin("again", None)
        bar.advance(by=5)
    lines = [record.getMessage() for record in caplog.records]
    assert [line.split("  ")[:2] for line in lines] == [
        ["1/4 runs", "first"],
        ["2/4 runs", "first"],
        ["4/4 runs", "last"],
        ["5 runs", "again"],
    ]
    assert "left" not in lines[3]


def test_a_download_shows_bytes_on_the_console_it_is_given():
    rich = pytest.importorskip("rich.console")
    import io

    out = io.StringIO()
    console = rich.Console(file=out, force_terminal=True, width=100, color_system=None)
    with Transfer(console) as bar:
        bar.begin("train-images", 2000)
        bar.advance(by=1500)
    assert "train-images" in out.getvalue()
    assert "1.5/2.0 kB" in out.getvalue()


def test_a_sweep_shows_runs_and_figures_on_the_console_it_is_given(tmp_path, monkeypatch):
    """The same bar as all others; where nobody would see it move, a line now and then."""
    rich = pytest.importorskip("rich.console")
    import io

    from bisls import console as commands
    from bisls.progress import Sweep

    class Run:
        work, error = 3.0, ""

    for terminal in (True, False):
        out = io.StringIO()
        console = rich.Console(file=out, force_terminal=terminal, width=100, color_system=None)
        shown = commands.Display(console, 2, tmp_path)
        assert isinstance(shown.progress, Sweep)
        shown.progress.every = 0.0
        with shown.progress:
            shown.wanted([Run(), Run()], 1)
            shown.done(Run(), Run())
            shown.figure(bisls.outcome.Outcome("one", "", "", "", "smoke", {}, (), ()))
        text = out.getvalue()
        assert "2 runs are to be made, 1 are there from earlier commands" in text
        assert "1/2" in text
        assert "1/2 figures, about 0 s left" in text
    assert "1/2 runs  0/2 figures, about 0 s left" in text


def test_there_is_one_progress_bar():
    """Everything that takes long in the package shows it by `bisls.progress`."""
    import re
    from pathlib import Path

    for path in Path(bisls.__file__).parent.rglob("*.py"):
        assert path.name == "progress.py" or not re.search(
            r"rich\.progress|rich import .*progress|tqdm", path.read_text()
        ), path


def test_without_rich_there_is_no_bar(monkeypatch):
    monkeypatch.setitem(sys.modules, "rich.console", None)
    with Progress(True, 2) as bar:
        bar.advance("on")
    assert bar.done == 1


def test_floating_numbers_of_arrays_become_those_of_the_parameters_and_tensors_stay():
    """NumPy's numbers are float64, torch's parameters float32; whole numbers and a user's own tensors are left alone."""
    seen = []

    def found_in(dtype, data) -> list:
        problem = ridge(dtype)
        for name in ("upper_loss", "lower_loss"):
            loss = getattr(problem, name)
            setattr(problem, name, lambda batch, loss=loss: seen.append([t.dtype for t in batch]) or loss(batch[:2]))
        seen.clear()
        fit(BiSLS(problem), data, data, 2, False)
        assert all(own == seen[0] for own in seen)
        return seen[0]

    rows = np.arange(4)
    single, double = torch.float32, torch.float64
    assert found_in(single, (ROWS, TARGET, rows)) == [single, single, torch.int64]
    assert found_in(double, (ROWS.astype(np.float32), TARGET, rows > 1)) == [double, double, torch.bool]
    mine = torch.as_tensor(ROWS)
    with pytest.raises(RuntimeError, match=r"dtype|scalar type"):
        found_in(single, (mine, TARGET))
    assert feed(ROWS, "upper_data", dtype=single).take().dtype == single
    assert feed(mine, "upper_data", dtype=single).take() is mine


@pytest.mark.parametrize("tape", [False, True])
def test_a_loss_that_fails_on_an_array_is_answered_with_what_to_pass(tape):
    layer, x = torch.nn.Linear(2, 1), torch.zeros(2, requires_grad=True)

    def loss(batch):
        return (layer(batch[0])[:, 0] - torch.as_tensor(batch[1])).square().mean()

    problem = bisls.Bilevel(
        loss, lambda b: loss(b) + (x.exp() * layer.weight[0] ** 2).sum(), [x], layer.parameters(), tape=tape
    )
    before = end(problem)
    with pytest.raises(
        ValueError,
        match=r"`BiSLS.step\(...\)`: a loss failed on a batch with a ndarray in it .*torch.as_tensor\(..., dtype=",
    ):
        BiSLS(problem).step((ROWS, TARGET), (ROWS, TARGET))
    assert end(problem) == before

    def broken(batch):
        raise RuntimeError("my own")

    problem.lower_loss = broken
    with pytest.raises(RuntimeError, match="my own"):
        BiSLS(problem).step((torch.as_tensor(ROWS).float(), 0), (torch.as_tensor(ROWS).float(), 0))


@pytest.mark.parametrize("name", ["h.csv", "h.TSV", "h.xlsx", "h.parquet"])
def test_a_history_is_not_saved_under_the_name_of_a_table(name, tmp_path):
    history = fit(BiSLS(ridge()), (ROWS, TARGET), (ROWS, TARGET), 2, False)
    with pytest.raises(
        ValueError, match=r"`History.save\(path=.*\)`: path names a table, and this writes JSON lines: end it in"
    ):
        history.save(tmp_path / name)
    assert not list(tmp_path.iterdir())
    for fine in ("h.jsonl", "h", "h.json", "h.csv.jsonl"):
        history.save(tmp_path / fine)
        assert len(bisls.History.load(tmp_path / fine)) == 2


# --- as many batches as a method asks for


class Numbered:
    """Batches 0, 1, 2, ... with a place that can be saved."""

    def __init__(self):
        self.n = -1

    def __call__(self):
        self.n += 1
        return torch.full((2,), 0.01 * self.n, dtype=torch.float64)

    def state_dict(self):
        return {"n": self.n}

    def load_state_dict(self, state):
        self.n = state["n"]


def shifted():
    x = torch.tensor([0.5, 1.0], dtype=torch.float64, requires_grad=True)
    y = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    return bisls.Bilevel(
        lambda b: (y - 3.0).square().sum(), lambda b: 0.5 * (y - x - b).square().sum(), [x], [y], tape=False
    )


def test_a_run_that_draws_more_batches_is_resumed_bit_for_bit(tmp_path):
    def run(*steps: int):
        for total in steps:
            torch.manual_seed(7)
            problem = shifted()
            solver = BiSLS(problem, hypergrad=bisls.StochasticNeumann(1200, smoothness=2.0), lower_iters=1)
            path = tmp_path / f"{len(steps)}.pt"
            rows = torch.utils.data.DataLoader(
                torch.arange(7.0).double().reshape(7, 1) / 10, batch_size=2, shuffle=True
            )
            history = fit(solver, rows, rows, total, False, checkpoint=path, resume=True)
        return end(problem), [repr(record) for record in history]

    assert run(3, 6) == run(6)


def test_batches_that_are_too_few_are_used_again():
    problem, seen = shifted(), []
    loss = problem.lower_loss
    problem.lower_loss = lambda b: seen.append(b[0].item()) or loss(b)
    solver = BiSLS(problem, hypergrad=bisls.StochasticNeumann(30, smoothness=2.0), polish=None)
    own = [torch.full((2,), float(i), dtype=torch.float64) for i in range(4)]
    torch.manual_seed(0)
    assert solver.step(None, own[:2]).status is not bisls.Status.NON_FINITE
    assert set(seen) == {0.0, 1.0}
    seen.clear()
    assert solver.step(None, own[:2], extra_batches=own[2:]).lower_steps == 2
    assert set(seen) == {0.0, 1.0, 2.0, 3.0}
    with pytest.raises(
        ValueError, match=r"extra_batches must be lower batches in a list, for a hypergradient that looks"
    ):
        bisls.Alternating(shifted()).step(None, own[:2], extra_batches=own[2:])
    with pytest.raises(ValueError, match=r"extra_batches must be lower batches in a list"):
        solver.step(None, own[:2], extra_batches=own[0])


@pytest.mark.parametrize("make", [bisls.BiSPS, bisls.Alternating], ids=["BiSPS", "Alternating"])
def test_a_judge_that_nobody_would_look_at_is_refused(make):
    drawn = Numbered()
    with pytest.raises(
        ValueError, match=r"`fit\(step_data=.*\)`: step_data must be None here: .* has no use for a batch"
    ):
        fit(make(shifted()), Numbered(), Numbered(), 3, False, step_data=drawn)
    assert drawn.n == -1
    batch = torch.zeros(2, dtype=torch.float64)
    with pytest.raises(
        ValueError, match=r".step\(step_batch=.*\)`: step_batch must be None here: Frozen\(\) looks at one"
    ):
        make(shifted()).step(batch, batch, step_batch=batch + 1)
    fit(make(shifted()), batch, batch, 2, False)  # one batch for every step judges nobody
    fit(bisls.BiSPS(shifted(), samples=2), Numbered(), Numbered(), 2, False, step_data=drawn)
    assert drawn.n == 1
