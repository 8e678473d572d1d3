"""A lower level that is led astray: the first loop by a line that lies, later ones by learning by heart."""

import math

import pytest
import torch
from sklearn.datasets import load_digits

import bisls
import bisls.tasks
from bisls import pace
from bisls.best import WINDOW, Best
from bisls.lower import first

NOWHERE = torch.zeros(1)


def after(*values, best=None):
    """Losses that are seen one after another; the batch adds nothing to their differences."""
    best, known = best or Best(torch.tensor([-1.0]), NOWHERE), {-1.0: values[0] + 1.0}
    for i, value in enumerate(values):
        known[float(i)] = value
        best = best.seen(value, known[best.x.item()], torch.tensor([float(i)]), NOWHERE)
    return best


def test_a_loss_that_has_risen_is_told_from_one_that_falls():
    falling = [3.0 - 0.02 * i + 0.01 * (-1) ** i for i in range(100)]
    assert not any(after(*falling[:n]).risen for n in range(1, 100))
    best = after(*falling)
    assert 1.9 < best.gained <= 4.0 - falling[int(best.x.item())]
    rising = [*falling[:40], *(2.4 + 0.1 * i + 0.01 * (-1) ** i for i in range(WINDOW))]
    best = after(*rising)
    assert best.risen
    assert 35 <= best.x.item() < 40
    assert not best.again().risen


def test_what_has_never_fallen_does_not_lead_back():
    best = Best(NOWHERE, NOWHERE)
    for i in range(50):
        best = best.seen(1.0 + 0.1 * i, 1.0, NOWHERE, NOWHERE)
    assert not best.risen


@pytest.mark.parametrize("noise", [0.0, 1.0, 3.0])
def test_noise_alone_seldom_counts_as_a_rise(noise):
    """After a fall by 200 times what y moves the loss by; the batch may move it by more."""
    risen = 0
    for seed in range(20):
        best, draw = Best(NOWHERE, NOWHERE, gained=200.0), torch.Generator().manual_seed(seed)
        own = there = 0.0
        for change, batch in torch.randn(300, 2, generator=draw, dtype=torch.float64).tolist():
            own = 0.8 * own + 0.6 * change
            before, best = best, best.seen(own + noise * batch, there, NOWHERE, NOWHERE)
            there = own if best.gained > before.gained else there
            risen, best = (risen + 1, best.again()) if best.risen else (risen, best)
    assert risen <= 10  # of 6,000


def test_values_that_are_not_finite_say_nothing():
    best = Best(NOWHERE, NOWHERE)
    assert best.seen(math.nan, 1.0, NOWHERE, NOWHERE) is best
    assert best.seen(1.0, math.inf, NOWHERE, NOWHERE) is best


def test_it_is_read_as_it_was_written():
    best = after(3.0, 2.0, 1.0, 1.1, 1.2)
    again = Best.unpacked(Best.kind(None, None).read(best.packed(), "best"))
    assert torch.equal(again.recent, best.recent)
    assert again.gained == best.gained


def first_loss():
    """f after the first lower loop: the value of g falls on and on as y gets worse, since weights depend on losses."""
    digits = load_digits()
    sizes = {"train": 900, "validation": 300, "test_size": None, "corrupted": 0.4}
    task = bisls.tasks.weight_network(digits.data.reshape(-1, 8, 8) / 16.0, digits.target, **sizes, seed=0)
    solver = bisls.BiSLS(task.problem)
    batches = [next(task.lower_data) for _ in range(10)]
    return solver.step(next(task.upper_data), batches).upper_value


def test_the_upper_loss_keeps_the_first_loop_from_running_away(monkeypatch):
    assert first_loss() < 2.4  # it begins at 2.3
    monkeypatch.setattr(first, "TRIES", 0)
    assert first_loss() > 10.0


def test_a_look_at_the_first_loop_leaves_no_trace():
    """With BatchNorm below its statistics are those of the steps that were taken."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
    x = torch.zeros(1, requires_grad=True)
    rows = [torch.randn(8, 3) for _ in range(3)]
    problem = bisls.Bilevel(
        lambda batch: (net(rows[0]) ** 2).mean(),
        lambda batch: ((net(batch) - x) ** 2).mean(),
        [x],
        list(net.parameters()),
    )
    solver = bisls.BiSLS(problem, hypergrad=bisls.Lookahead())
    solver.step(None, rows)
    assert net[1].num_batches_tracked.item() <= 4  # three lower steps, and f once


def forgetful():
    """f is lowest on the way to the lower solution, and x can do next to nothing about it."""
    x, y = torch.zeros(3, requires_grad=True), torch.full((3,), -3.0, requires_grad=True)
    return bisls.Bilevel(
        lambda batch: (y**2).sum() + 0.01 * batch, lambda batch: ((y - 3.0 - 1e-6 * x - batch) ** 2).sum(), [x], [y]
    )


def returned(f):
    """The x that is kept, and that of the best point, when y goes back."""
    x, y = torch.zeros(1, requires_grad=True), torch.zeros(2, requires_grad=True)
    problem = bisls.Bilevel(lambda _: f(x, y), lambda batch: ((y - x - batch) ** 2).sum(), [x], [y])
    solver = bisls.BiSLS(problem, hypergrad=bisls.Lookahead())
    solver.step(None, [torch.ones(2), -torch.ones(2)])
    lead = {"gained": 1.0, "recent": torch.linspace(0.4, 0.5, WINDOW, dtype=torch.float64)}
    best = {"x": torch.full((1,), -5.0), "y": torch.full((2,), 0.25), **lead}
    solver._upper_state = {**solver._upper_state, "best": best}
    here = x.item()
    record = solver.step(None, [torch.ones(2), -torch.ones(2)])
    assert record.upper_status is bisls.Status.RETURNED
    assert y.tolist() == [0.25, 0.25]
    return x.item(), here


def test_what_x_has_learnt_since_stays_where_it_does_f_no_harm():
    kept, here = returned(lambda x, y: -y.sum())
    assert kept == here != -5.0
    kept, here = returned(lambda x, y: -y.sum() + 0.01 * (x + 5.0).square().sum())
    assert kept == -5.0


@pytest.mark.parametrize(("wanted", "lost"), [(1.0, True), (-1.0, False)])
def test_x_that_has_next_to_no_influence_goes_back_where_f_was_lower(wanted, lost):
    x, y = torch.zeros(1, requires_grad=True), torch.zeros(1, requires_grad=True)
    problem = bisls.Bilevel(
        lambda _: (y - wanted).square().sum(), lambda batch: (y - x.sigmoid() - batch).square().sum(), [x], [y]
    )
    solver = bisls.BiSLS(problem, hypergrad=bisls.Lookahead())
    noise = [torch.full((1,), 0.1), torch.full((1,), -0.1)]
    solver.step(None, noise)
    before = {"most": 1e6, "longest": 1e6, "faint": 4}
    solver._upper_state = {**solver._upper_state, **before}
    with torch.no_grad():
        x.fill_(-20.0)  # saturated
    record = solver.step(None, noise)
    assert (record.upper_status is bisls.Status.RESTARTED) == lost
    assert (x.item() == 0.0) == lost
    assert lost or x.item() < -10.0


def test_f_that_has_risen_leads_back_to_where_it_was_lowest(monkeypatch):
    monkeypatch.setattr(pace, "CALM", 0.0)  # which would see it coming
    monkeypatch.setattr(pace, "START", 0.0003)
    monkeypatch.setattr(pace, "GAIN", 0.0)
    problem = forgetful()
    solver = bisls.BiSLS(problem, hypergrad=bisls.Lookahead())
    draw, records = torch.Generator().manual_seed(0), []
    for _ in range(300):
        batches = [0.1 * torch.randn(3, generator=draw) for _ in range(2)]
        records.append(solver.step(float(torch.randn(1, generator=draw)), batches))
        if records[-1].upper_status is bisls.Status.RETURNED:
            break
    assert records[-1].upper_status is bisls.Status.RETURNED
    values = [record.upper_value for record in records]
    assert float((problem.y.read() ** 2).sum()) < 0.5 * values[-1]
    assert solver.step(0.0, batches).beta < 0.5 * records[-1].beta
