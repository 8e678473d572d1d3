"""Lower steps from a start that x computes: their size is learnt from f, and x goes back where f has risen."""

import math

import pytest
import torch

import bisls
from bisls.best import WINDOW
from bisls.hypergrad.lookahead import through
from bisls.lower import Begun, Effect, Held, Loop, begin
from bisls.lower import begun as module
from bisls.oracle import Oracle
from bisls.sampling import Previous, minibatches, sample_of
from bisls.status import Status

DOUBLE = {"dtype": torch.float64}


def curved(h=3.0, at=2.0):
    """Every iteration begins at y = x; g = h y^2 / 2, f = (y - 1)^2."""
    x = torch.full((1,), at, **DOUBLE, requires_grad=True)
    y = torch.zeros(1, **DOUBLE, requires_grad=True)
    f, g = (lambda batch: ((y - 1) ** 2).sum()), (lambda batch: h / 2 * (y**2).sum())
    return bisls.Bilevel(f, g, [x], [y], lower_start=lambda: [1.0 * x])


@pytest.mark.parametrize("steps", [1, 4])
def test_what_steps_do_to_f_is_seen_on_the_way_back(steps):
    """Against what a quadratic allows to be written down."""
    problem, beta, h = curved(), 0.25, 3.0
    oracle, part = Oracle(problem), Loop(bisls.Constant(beta))
    with torch.no_grad():
        sample = sample_of("test", 0, minibatches("test", 0, steps, False), None, (), Previous(), bisls.Rerun())
        y, began = begin(oracle, part, sample, problem.y.read(), 0, {})
        lowered = part.descend(oracle, sample.lower, y, 0, {}, trace=True)
        flat, effect = through(oracle, lowered.trace, oracle.upper(0), None, began, True)
    left = (1 - beta * h) ** steps
    assert effect.growth == pytest.approx(left, rel=1e-12)
    assert flat.item() == pytest.approx(2 * (2 * left - 1) * left, rel=1e-12)
    slope = 2 * (2 * left - 1) * 2 * steps * (1 - beta * h) ** (steps - 1) * -h * beta
    assert effect.slope == pytest.approx(slope, rel=1e-12)
    assert effect.steps == steps


def state_of(step, first=1.0):
    memory = {"k": 5, "step": step, "notes": {"first": first}}
    return {"memory": memory, "direction": {}, "average": {}, "accepted": step, "slopes": module.NOTHING}


def after(*effects, step=1.0):
    state = state_of(step)
    for effect in effects:
        state = Begun().taught(state, effect)
    return state["memory"]["step"]


def test_steps_follow_the_slope_of_f_by_a_tenth_an_iteration():
    assert after(*[Effect(3.0, 1.0, 5)] * 10) == pytest.approx(math.exp(-1.0))
    assert after(*[Effect(-1e-9, 1.0, 5)] * 10) == pytest.approx(math.exp(1.0))  # whatever its size
    swings = [Effect((-1) ** i, 1.0, 5) for i in range(100)]
    assert 0.8 < after(*swings) < 1.2
    assert after(*swings, Effect(1e9, 1.0, 5)) > 0.9 * after(*swings)  # one batch
    assert after(*[Effect(1.0, math.nan, 5)] * 1000) == module.SHORTEST
    assert after(*[Effect(1.0, 9.0, 5)] * 1000) == module.LEAST


def test_steps_are_shorter_where_gradients_grow_on_their_way_back_whatever_f_says():
    wants_longer = {"slope": -1.0, "steps": 4}
    assert after(Effect(growth=1.4, **wants_longer)) > 1.0
    assert after(Effect(growth=1.6, **wants_longer)) < 1.0
    assert after(Effect(growth=math.inf, **wants_longer)) == pytest.approx(math.exp(-1.0))  # the first one by more
    long = [Effect(growth=1.0, **wants_longer)] * 50
    assert after(*long, Effect(growth=1e30, **wants_longer)) == pytest.approx(after(*long) * math.exp(-module.RATE))


def test_the_first_step_is_a_part_of_what_suits_the_first_batch_and_held_from_there_on():
    problem = curved(h=4.0)
    solver = bisls.BiSLS(problem, lower_iters=3)
    assert solver.lower == Begun(Held())
    first = solver.step(0, 0)
    assert 0.3 * 0.125 <= first.beta <= 0.3 * 0.25  # of 1 / 4
    assert first.lower_checks > 0
    second = solver.step(0, 0)
    assert second.lower_checks == 0
    assert abs(math.log(second.beta / first.beta)) <= module.RATE + 1e-12
    # what somebody asks for is taken as it is
    own = bisls.BiSLS(curved(), lower_step=bisls.Constant(0.1))
    assert own.lower == Loop(bisls.Constant(0.1))
    assert bisls.BiSLS(curved(), hypergrad=bisls.Lookahead(2)).lower == Begun(Held())


@pytest.mark.parametrize("bound", [None, bisls.Box(-10.0, 10.0)])
def test_f_that_has_risen_leads_x_back_where_y_begins_anew(bound):
    problem = curved()
    if bound is not None:
        x, y = problem.x.tensors[0], problem.y.tensors[0]
        start = {"lower_start": lambda: [1.0 * x]}
        problem = bisls.Bilevel(problem.upper_loss, problem.lower_loss, [x], [y], upper_bounds=bound, **start)
    solver = bisls.BiSLS(problem, lower_iters=2)
    solver.step(0, 0)
    solver.step(0, 0)
    lead = {"gained": 1.0, "recent": torch.linspace(0.4, 0.5, WINDOW, **DOUBLE)}
    best = {"x": torch.full((1,), 1.9, **DOUBLE), "y": problem.y.read(), **lead}
    limit = solver._upper_state["pace"]["limit"]
    solver._upper_state = {**solver._upper_state, "best": best}
    with torch.no_grad():
        problem.x.tensors[0].fill_(2.95)
    record = solver.step(0, 0)
    assert record.upper_status is Status.RETURNED
    assert problem.x.tensors[0].item() == 1.9
    assert solver._upper_state["pace"]["limit"] < limit
    solver.load_state_dict(solver.state_dict())
    assert solver.step(0, 0).upper_status is Status.OK


@pytest.mark.parametrize(("sign", "own"), [(1.0, Begun), (-1.0, Loop)])
def test_an_opponent_below_is_not_weakened_for_the_sake_of_f(sign, own):
    """In a minimax problem any step raises f, and shorter ones would lower it for ever."""
    x, y = torch.full((2,), 0.5, **DOUBLE, requires_grad=True), torch.zeros(2, **DOUBLE, requires_grad=True)

    def f(batch):
        return ((y - x) ** 2).sum() - 2.0 * (y**2).sum() + (x**2).sum()

    start = {"lower_start": lambda: [torch.full((2,), 0.1, **DOUBLE)]}
    problem = bisls.Bilevel(f, lambda batch: sign * f(batch), [x], [y], **start)
    solver = bisls.BiSLS(problem, lower_iters=3)
    solver.step(0, 0)
    assert type(solver.lower) is own
    again = bisls.BiSLS(problem, lower_iters=3)
    again.load_state_dict(solver.state_dict())
    assert type(again.lower) is own


@pytest.mark.parametrize("fixed", [False, True])
def test_growth_counts_where_it_goes_into_the_hypergradient(fixed):
    x, y = torch.ones(1, **DOUBLE, requires_grad=True), torch.zeros(1, **DOUBLE, requires_grad=True)
    start = (lambda: [torch.ones(1, **DOUBLE)]) if fixed else lambda: [1.0 * x]
    problem = bisls.Bilevel(
        lambda batch: ((y - 3) ** 2).sum(), lambda batch: ((y - x) ** 2).sum(), [x], [y], lower_start=start
    )
    solver = bisls.BiSLS(problem, lower_iters=2)
    solver.step(0, 0)
    assert math.isnan(effect_of(solver).growth) == fixed


def effect_of(solver):
    """What the next iteration sees."""
    found = []
    part = solver.lower

    class Seen(type(part)):
        def taught(self, state, effect):
            found.append(effect)
            return super().taught(state, effect)

    solver.lower = Seen(**vars(part))
    solver.step(0, 0)
    return found[0]


def test_f_at_the_best_x_is_asked_for_now_and_then_while_f_falls():
    problem = curved(at=30.0)
    solver = bisls.BiSLS(problem, lower_iters=2)
    records = [solver.step(0, 0) for _ in range(41)]
    assert records[-1].upper_value < records[8].upper_value
    asked = [record.cost.upper_values for record in records[30:]]
    assert 0 in asked  # in every iteration it would be 1, and more where the average is looked at
    assert max(asked) >= 1


def characters(classes, each, seed):
    """Made-up characters: a template each, seen with noise."""
    draw = torch.Generator().manual_seed(seed)
    templates = (torch.rand(classes, 36, generator=draw) < 0.3).float()
    labels = torch.arange(classes).repeat_interleave(each)
    return templates[labels] + 0.5 * torch.randn(classes * each, 36, generator=draw), labels


@pytest.mark.slow
@pytest.mark.parametrize("steps", [1, 10])
def test_tasks_are_learnt_better_and_better_with_nothing_set(steps):
    source = bisls.tasks.Pictures(*characters(120, 8, 3), ways=4)
    task = bisls.tasks.few_shot(source, shots=1, queries=4, hidden=32, lower_iters=steps)
    solver = bisls.BiSLS(task.problem, lower_iters=steps)
    history = bisls.fit(solver, task.upper_data, None, 150, progress=False)
    early, later, last = (history["upper_value"][part].mean() for part in (slice(30), slice(60, 90), slice(120, None)))
    assert later < 0.9 * early
    assert last < later
    assert all(record.upper_status is not Status.UPPER_ROSE for record in history)
