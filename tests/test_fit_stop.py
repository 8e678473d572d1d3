"""Where a run ends: nothing changes any more, or a number has stopped falling and the best point is wanted back."""

from __future__ import annotations

import json
import logging

import pytest
import torch
from torch.utils.data import DataLoader

import bisls
from bisls.callbacks import Callback, EarlyStopping, Evaluate, JSONLines
from bisls.checkpoint import Checkpoint, CheckpointError
from bisls.directions import Denoised
from bisls.fit import Interrupted, fit
from bisls.methods import Alternating, BiSLS, BiSPS
from bisls.record import History, Record
from bisls.standstill import STILL, Standstill
from bisls.status import Status
from bisls.steps import Constant, Decay
from bisls.steps.base import Step, StepRule

REASON = "no change of f, x and y beyond rounding in 10 iterations (tol=0)"
SCALED = Denoised(b2=0.999)  # along scaled gradients f is never left alone for long
HIDDEN = "f has not fallen in 30 iterations whose gain its rounding hides (tol=0)"


def solved_in_one(dtype=torch.float32, offset: float = 0.0):
    """F(x) = (x - 3)^2 + (x - 3)^2 + offset, y* = (x, x)."""
    x = torch.tensor([0.5], dtype=dtype, requires_grad=True)
    y = torch.tensor([2.0, -1.0], dtype=dtype, requires_grad=True)
    return bisls.Bilevel(
        lambda _: ((y - 3.0) ** 2).sum() + offset, lambda _: (torch.tensor([1.0, 4.0]) * (y - x) ** 2).sum(), [x], [y]
    )


def noisy():
    """The same on rows, whose mean is the 3."""
    x, y = torch.tensor([0.5], requires_grad=True), torch.tensor([2.0], requires_grad=True)
    problem = bisls.Bilevel(lambda rows: ((y - rows) ** 2).mean(), lambda rows: ((y - x) ** 2).sum(), [x], [y])
    return problem, DataLoader(torch.tensor([3.0, 3.0, 3.0, 3.0]), 2)


def where(problem):
    return problem.x.read(), problem.y.read()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("offset", "direction", "reason"), [(0.0, None, REASON), (7.3, None, REASON), (7.3, SCALED, HIDDEN)]
)
def test_a_solved_problem_ends_the_run_and_the_history_says_why(dtype, offset, direction, reason, caplog):
    problem = solved_in_one(dtype, offset)
    with caplog.at_level(logging.INFO, logger="bisls"):
        history = fit(BiSLS(problem, direction=direction), steps=500, progress=False)
    assert STILL < len(history) < 100
    assert history.stopped == reason
    assert f"stopped at k = {len(history)}: {reason}" in caplog.text
    assert repr(history).endswith(f"stopped: {reason})")
    # F - F* = 2 (x - 3)^2 is below what f can show
    assert 2 * (problem.x.read().item() - 3.0) ** 2 <= 4 * torch.finfo(dtype).eps * offset


@pytest.mark.parametrize(
    "make", [BiSPS, lambda problem: Alternating(problem, upper_step=Constant(0.05), lower_step=Constant(0.1))]
)
def test_other_methods_end_where_rounding_holds_them(make):
    problem = solved_in_one(offset=7.3)
    solver = make(problem)
    assert fit(solver, steps=5000, progress=False, on_failure="ignore").stopped == REASON
    at = where(problem)
    assert at[0].item() == pytest.approx(3.0, rel=1e-5)
    more = fit(solver, steps=200, progress=False, on_failure="ignore", tol=None)
    assert (len(more), more.stopped) == (200, "")
    assert where(problem)[0].item() == pytest.approx(3.0, rel=1e-5)  # what goes on is rounding


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "most"),  # roundings by which F may fall afterwards: 1.3, 6.9 and 0 were seen
    [(bisls.tasks.ridge_penalties, 4), (bisls.tasks.logistic_penalties, 16), (bisls.tasks.quadratic, 4)],
)
def test_no_task_is_ended_before_its_f_has_converged(make, most):
    task = make()
    solver = BiSLS(task.problem, lower_iters=task.lower_iters)
    history = fit(solver, task.upper_data, task.lower_data, 250, False, on_failure="ignore")
    assert history.stopped == HIDDEN or history.stopped.startswith("no change of f, x and y beyond rounding")
    found, eps = task.exact(), torch.finfo(task.problem.x.read().dtype).eps
    fit(solver, task.upper_data, task.lower_data, 200, False, on_failure="ignore", tol=None)
    assert found - task.exact() <= most * eps * found


def test_without_tol_all_iterations_are_made():
    assert len(fit(BiSLS(solved_in_one()), steps=60, progress=False, tol=None)) == 60


def test_a_larger_tol_ends_sooner():
    lengths = []
    for tol in (0.0, 1e-6, 1e-3):
        task = bisls.tasks.quadratic()
        lengths.append(len(fit(BiSLS(task.problem), task.upper_data, task.lower_data, 500, False, tol=tol)))
    assert 500 > lengths[0] > lengths[1] > lengths[2] > STILL


@pytest.mark.parametrize("tol", [-1.0, float("nan"), float("inf"), "1e-3", True])
def test_a_tol_that_cannot_be_used_is_refused(tol):
    with pytest.raises(ValueError, match=r"`fit\(tol=.*\)`: tol must be at least 0, or None"):
        fit(BiSLS(solved_in_one()), progress=False, tol=tol)


def test_data_in_batches_never_end_a_run():
    problem, rows = noisy()  # every batch is alike, so it does stand still
    for data in ((rows, None, None), (rows, rows, None), (None, rows, None), (torch.full((2,), 3.0), None, rows)):
        upper, lower, step = data
        upper = torch.full((2,), 3.0) if upper is None else upper
        history = fit(BiSLS(problem), upper, lower, 40, False, step_data=step)
        assert (len(history), history.stopped) == (40, "")


def test_dropout_never_ends_a_run():
    x, y = torch.tensor([0.5], requires_grad=True), torch.zeros(4, requires_grad=True)
    problem = bisls.Bilevel(
        lambda _: ((torch.dropout(y, 0.5, True) - 3.0) ** 2).sum(), lambda _: ((y - x) ** 2).sum(), [x], [y]
    )
    assert len(fit(BiSLS(problem), steps=80, progress=False, on_failure="ignore")) == 80


class Late(StepRule):
    """A warm-up: nothing at first, then a constant step."""

    def choose(self, line, memory):
        return Step(0.0 if memory.k < 40 else 0.1, memory.later())


class Growing(StepRule):
    """A warm-up from a step that float32 cannot see."""

    def choose(self, line, memory):
        return Step(min(1e-14 * 1.3**memory.k, 0.1), memory.later())


def steady(problem, rule):
    """y is solved from the start, so that the upper step alone decides."""
    problem.y.write_(problem.x.read().expand(2))
    return Alternating(problem, upper_step=rule, lower_step=Constant(0.1), direction=bisls.Steepest())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "steps", "offset"),
    [
        (lambda problem: steady(problem, Late()), 400, 0.0),
        (lambda problem: steady(problem, Growing()), 400, 0.0),
        (lambda problem: steady(problem, Constant(1e-3)), 1500, 0.0),  # slow
        (lambda problem: steady(problem, Constant(1e-3)), 1500, 1e8),  # f itself cannot show it
        (lambda problem: steady(problem, Decay(0.05)), 1000, 0.0),
        (lambda problem: BiSLS(problem, alpha=1e-12, beta=1e-12), 400, 0.0),
    ],
    ids=["late", "growing", "slow", "hidden", "decay", "tiny first steps"],
)
def test_no_run_is_ended_before_it_is_where_it_would_have_come(make, steps, offset):
    ends = {}
    for tol in (0.0, None):
        problem = solved_in_one(offset=offset)
        fit(make(problem), steps=steps, progress=False, tol=tol)
        ends[tol] = problem.x.read().item()
    assert abs(ends[None] - 0.5) > 0.1  # it came somewhere
    assert ends[0.0] == pytest.approx(ends[None], rel=2e-6)


def test_momentum_that_points_uphill_is_waited_for():
    """Without a step nothing moves, but the direction turns."""
    still = Standstill(solved_in_one(), 0.0)
    for k in range(3 * STILL):
        still.look(Record(k, 1.0, 0.0, 0.0, 0.1, 0, 0, 0.5, 0.0, upper_status=Status.NOT_DESCENT))
    assert still.reason == ""
    for k in range(STILL + 2):
        still.look(Record(k, 1.0, 0.0, 0.0, 0.1, 0, 0, 0.0, 0.0, upper_status=Status.STATIONARY))
    assert still.reason == REASON


def test_slow_progress_adds_up():
    """One unit in the last place an iteration is no progress in one iteration, and is in ten."""
    problem = solved_in_one()
    still, x = Standstill(problem, 0.0), problem.x.tensors[0]
    for k in range(5 * STILL):
        with torch.no_grad():
            x.copy_(torch.nextafter(x, torch.tensor([3.0])))
        still.look(Record(k, 1.0, 0.0, 0.1, 0.1, 0, 0, 0.5, 0.0))
        assert still.reason == ""


def test_what_failed_is_no_standstill():
    still = Standstill(solved_in_one(), 0.0)
    for k in range(3 * STILL):
        status = Status.CAPPED if k % STILL == STILL - 1 else Status.STATIONARY
        still.look(Record(k, 1.0, 0.0, 0.0, 0.1, 0, 0, 0.5, 0.0, upper_status=status, status=status))
    assert still.reason == ""


@pytest.mark.slow
@pytest.mark.parametrize("offset", [0.0, 7.3])
@pytest.mark.parametrize("cut", [1, 4, 7, 9, 12, 16, 17, 30, 45])
def test_a_resumed_run_ends_where_it_would_have_ended(cut, offset, tmp_path):
    whole = fit(BiSLS(solved_in_one(offset=offset)), steps=200, progress=False)
    assert whole.stopped
    path = tmp_path / "run.pt"

    def run(steps, **options):
        return fit(
            BiSLS(solved_in_one(offset=offset)), None, None, steps, False, checkpoint=path, resume=True, **options
        )

    run(cut)
    for _ in range(2):  # the second time it had ended already
        resumed = run(200)
        assert [record.to_dict() for record in resumed] == [record.to_dict() for record in whole]
        assert resumed.stopped == whole.stopped
    on = run(100, tol=None)
    assert (len(on), on.stopped) == (100, "")


def test_callbacks_know_the_last_iteration(tmp_path):
    path, seen = tmp_path / "run.jsonl", []
    callbacks = [Evaluate(lambda: 1.0, every=1000), JSONLines(path), lambda record, state: seen.append(state.reason)]
    history = fit(BiSLS(solved_in_one()), steps=500, progress=False, callbacks=callbacks)
    assert seen == [""] * (len(history) - 1) + [REASON]
    assert [row["k"] for row in history.evaluations] == [len(history) - 1]
    loaded = History.load(path)
    assert (loaded.stopped, repr(loaded.records)) == (REASON, repr(history.records))
    assert loaded.evaluations == history.evaluations


# --- History.save, and why a run ended


def test_a_history_is_saved_and_loaded(tmp_path):
    history = fit(
        BiSLS(solved_in_one()), steps=500, progress=False, callbacks=[Evaluate(lambda: float("nan"), every=3)]
    )
    path = tmp_path / "new" / "run.jsonl"
    history.save(path)
    loaded = History.load(path)
    assert repr(loaded.records) == repr(history.records)
    assert repr(loaded.evaluations) == repr(history.evaluations)
    assert loaded.stopped == history.stopped == REASON
    History(history.records[:2]).save(path)
    assert (len(History.load(path)), History.load(path).stopped) == (2, "")
    assert [own.name for own in path.parent.iterdir()] == ["run.jsonl"]
    assert all(json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines())


def test_every_early_end_has_a_reason(tmp_path):
    problem, rows = noisy()
    assert "the iterator ended after 2 batches" in fit(BiSLS(problem), iter(rows), None, 9, False).stopped
    stop = fit(BiSLS(problem), rows, None, 9, False, [lambda record, state: state.stop("enough")])
    assert (len(stop), stop.stopped) == (1, "enough")
    last = fit(BiSLS(problem), rows, None, 1, False, [lambda record, state: state.stop("enough")])
    assert last.stopped == ""  # all iterations were made
    path = tmp_path / "run.jsonl"
    stopping = EarlyStopping(patience=1, min_delta=100.0)
    ended = fit(BiSLS(problem), rows, None, 9, False, [JSONLines(path), stopping])
    assert ended.stopped.startswith("no improvement on")
    assert len(ended) == 2
    assert History.load(path).stopped == ended.stopped  # though the line was written before
    with pytest.raises(ZeroDivisionError):
        fit(BiSLS(problem), rows, None, 9, False, [JSONLines(tmp_path / "two.jsonl"), Broken()])
    assert History.load(tmp_path / "two.jsonl").stopped == "ZeroDivisionError: division by zero"


class Broken(Callback):
    def step(self, record, state):
        raise ZeroDivisionError("division by zero")


# --- EarlyStopping(restore=True)


class Swelling(StepRule):
    def choose(self, line, memory):
        return Step(0.05 * 1.4**memory.k, memory.later())


def rising(buffers=()):
    """A run that falls, and then gets worse: the steps above grow beyond what the problem bears."""
    problem = solved_in_one()
    problem = bisls.Bilevel(
        problem.upper_loss, problem.lower_loss, list(problem.x.tensors), list(problem.y.tensors), buffers=buffers
    )
    return Alternating(
        problem, upper_step=Swelling(), lower_step=Constant(0.1), direction=bisls.Steepest(), lower_iters=30
    )


def test_the_best_point_by_the_record_is_put_back():
    made = rising()
    points = {}

    class Points(Callback):
        def step(self, record, state):
            points[record.k] = [tensor.clone() for tensor in state.solver.measured]

    stopping = EarlyStopping(patience=4, restore=True)
    history = fit(made, steps=60, progress=False, callbacks=[stopping, Points()], tol=None)
    values = history["upper_value"]
    best = int(values.argmin())
    assert best == stopping.best_k < len(history) - 1
    x, y = where(made.problem)
    assert torch.equal(x, points[best][0])
    assert torch.equal(y, points[best][1])
    assert made.problem.upper_loss(None).item() == values[best]  # the number that was seen, at the point put back


def test_the_best_point_by_a_function_is_put_back_with_the_buffers():
    count = torch.zeros(())
    made = rising((count,))
    upper = made.problem.upper_loss
    values = []

    def score():
        values.append(upper(None).item())
        return values[-1]

    class Counts(Callback):
        def step(self, record, state):
            count.add_(1)

    stopping = EarlyStopping(patience=4, on=score, restore=True)
    fit(made, steps=60, progress=False, callbacks=[Counts(), stopping], tol=None)
    assert upper(None).item() == min(values) < values[-1]
    assert int(count) == stopping.best_k + 1


def test_without_restore_the_last_point_stays():
    made = rising()
    stopping = EarlyStopping(patience=4)
    fit(made, steps=60, progress=False, callbacks=[stopping], tol=None)
    assert made.problem.upper_loss(None).item() > stopping.best
    assert stopping.state_dict()["point"] is None


@pytest.mark.parametrize("cut", [1, 3, 5])
def test_a_resumed_run_puts_the_same_point_back(cut, tmp_path):
    whole = rising()
    history = fit(whole, steps=60, progress=False, callbacks=[EarlyStopping(patience=4, restore=True)], tol=None)
    path = tmp_path / "run.pt"

    class Stop(Callback):
        def step(self, record, state):
            if state.k == cut:
                raise KeyboardInterrupt

    def run(*others):
        made = rising()
        callbacks = [EarlyStopping(patience=4, restore=True), *others]
        return made, fit(made, None, None, 60, False, callbacks, Checkpoint(path, every=1), True, tol=None)

    with pytest.raises(KeyboardInterrupt):
        run(Stop())
    for _ in range(2):  # the second time it had ended already
        made, resumed = run()
        assert [record.to_dict() for record in resumed] == [record.to_dict() for record in history]
        for ours, theirs in zip(where(made.problem), where(whole.problem), strict=True):
            assert torch.equal(ours, theirs)


def test_an_interrupt_leaves_the_last_point(tmp_path):
    made = rising()
    last = []

    def interrupt(record, state):
        last[:] = where(made.problem)
        if state.k == 12:
            raise Interrupted("now", state.history)

    stopping = EarlyStopping(patience=40, restore=True)
    with pytest.raises(Interrupted):
        fit(made, steps=60, progress=False, callbacks=[stopping, interrupt], tol=None)
    assert stopping.best_k < 10
    assert all(torch.equal(a, b) for a, b in zip(where(made.problem), last, strict=True))


def test_a_point_that_was_not_kept_is_not_promised(tmp_path):
    path = tmp_path / "run.pt"
    fit(rising(), steps=2, progress=False, callbacks=[EarlyStopping()], checkpoint=path)
    with pytest.raises(
        CheckpointError, match=r"`EarlyStopping\(restore=True\)`: the state is of one that kept no point"
    ):
        fit(rising(), steps=4, progress=False, callbacks=[EarlyStopping(restore=True)], checkpoint=path, resume=True)
    with pytest.raises(ValueError, match=r"`EarlyStopping\(restore=1\)`: restore must be True or False"):
        EarlyStopping(restore=1)

    class Own:
        lower_iters, k = 1, 0

        def __init__(self):
            self.problem = solved_in_one()

        def step(self, *batches):
            raise NotImplementedError

        def state_dict(self):
            return {}

        load_state_dict = step

    with pytest.raises(ValueError, match=r"Own does not tell the point that its record belongs to"):
        fit(Own(), steps=1, progress=False, callbacks=[EarlyStopping(restore=True)])


def towards_the_mean():
    x, y = torch.tensor([0.5], requires_grad=True), torch.tensor([2.0, -1.0], requires_grad=True)
    return bisls.Bilevel(
        lambda b: ((y - b.mean()) ** 2).sum(), lambda b: ((y - x) ** 2).sum() + 0.01 * b.sum(), [x], [y]
    )


def test_a_loader_of_one_batch_is_one_batch():
    """A validation set that fits into one batch is no noise, at either level; shuffled rows, or rows that change, are."""
    data = torch.arange(6.0).reshape(6, 1)

    class Changing(torch.utils.data.Dataset):
        def __len__(self):
            return 6

        def __getitem__(self, i):
            return data[i] + 0.01 * torch.rand(1)

    def run(upper, lower):
        history = fit(BiSLS(towards_the_mean()), upper, lower, 100, False)
        return len(history), history.stopped

    def loader(rows=data, **settings):
        return torch.utils.data.DataLoader(rows, batch_size=6, **settings)

    whole = run(data, data)
    assert whole[0] < 50
    for pair in ((loader(), loader()), (data, loader()), (loader(), data)):
        assert run(*pair) == whole
    torch.manual_seed(0)
    for noise in (loader(shuffle=True), loader(Changing()), torch.utils.data.DataLoader(data, batch_size=3)):
        assert run(noise, loader()) == (100, "")
        assert run(loader(), noise) == (100, "")


def test_a_run_on_a_loader_of_one_batch_is_resumed_and_stops_where_it_would(tmp_path):
    def run(*steps):
        for total in steps:
            problem = towards_the_mean()
            rows = torch.utils.data.DataLoader(torch.arange(6.0), batch_size=6)
            history = fit(BiSLS(problem), rows, rows, total, False, checkpoint=tmp_path / f"{len(steps)}", resume=True)
        return [repr(record) for record in history], history.stopped, problem.x.read().tolist()

    assert run(4, 12, 100) == run(100)
    assert run(100)[1]
