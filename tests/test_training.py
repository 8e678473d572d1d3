"""A training script that gains an upper level: in five lines, in two processes, killed, and in the ways people write them."""

from __future__ import annotations

import difflib
import io
import json
import logging
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from two_ranks import EXAMPLES, digest, ended, example, shared

import bisls
from bisls.status import Status

HERE = Path(__file__).parent


def code(name: str) -> list[str]:
    """The lines of an example: its text at the top, remarks and empty lines left out."""
    lines = (EXAMPLES / f"{name}.py").read_text().split('"""', 2)[2].splitlines()
    return [line.partition("  #")[0] for line in lines if line.strip()]


def test_an_upper_level_is_five_lines():
    ordinary, twin = code("training"), code("training_bilevel")
    written = [line for line in difflib.ndiff(ordinary, twin) if line.startswith("+ ")]
    assert len(written) == 5, written
    assert sum("bisls" in line for line in ordinary) == 0


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nobody disturbed."""
    logging.disable(logging.INFO)
    path = tmp_path_factory.mktemp("whole") / "run.pt"
    with torch.random.fork_rng():
        run = example("training_bilevel").main(["--epochs", "2", "--checkpoint", str(path)])
        yield run, ended(run)
    logging.disable(logging.NOTSET)


def test_it_learns_whom_to_trust(whole):
    run, _ = whole
    trust = run["rows"][-1]["trust"]
    assert min(trust[:2]) > max(trust[3:])
    assert run["optimizer"].param_groups[0]["lr"] == 0.0  # the schedule is at its end


@pytest.mark.slow
def test_killed_in_mid_iteration_and_resumed_it_is_the_same_to_the_last_bit(whole, tmp_path):
    path = tmp_path / "run.pt"
    script = f"""
import os, pathlib, signal, sys
sys.path.insert(0, {str(HERE)!r})
from two_ranks import example, stopping
stopping(pathlib.Path({str(path)!r}), lambda: os.kill(os.getpid(), signal.SIGKILL))
example("training_bilevel").main(["--epochs", "2", "--checkpoint", {str(path)!r}])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=False, timeout=300)
    assert done.returncode == -signal.SIGKILL, done.stderr
    with torch.random.fork_rng():
        resumed = example("training_bilevel").main(["--epochs", "2", "--checkpoint", str(path)])
        assert len(resumed["rows"]) == 1  # one epoch had been saved
        now, then = digest(ended(resumed)), digest(whole[1])
    assert now == then
    assert sum("running_var" in name for name in now) == 2
    assert sum("exp_avg_sq" in name for name in now) == 10


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    done = subprocess.run(
        [*command, str(HERE / "two_ranks.py"), str(folder)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.slow
def test_two_processes_take_the_same_decisions(ranks):
    own = {".random"}  # each draws its own masks
    first, second = ({name: text for name, text in found["whole"].items() if name not in own} for found in ranks)
    assert first == second
    assert ranks[0]["whole"][".trust"] != digest({"": torch.zeros(5)})[""]


@pytest.mark.slow
def test_a_rank_that_fails_ends_the_run_on_both_and_it_is_resumed_to_the_last_bit(ranks):
    assert ranks[1]["said"] == "Interrupted: the ink is dry"
    assert ranks[0]["said"].startswith("RankError: rank 1 raised Interrupted: the ink is dry")
    for found in ranks:
        assert found["resumed"] == found["whole"]


@pytest.mark.slow
def test_a_module_in_ddp_is_averaged_once(ranks):
    assert ranks[0]["wrapped"] == ranks[1]["wrapped"]
    assert ranks[0]["wrapped"] == pytest.approx(shared(0, 1), rel=1e-4)


@pytest.mark.slow
def test_another_number_of_batches_on_one_rank_is_said_on_both(ranks):
    for found in ranks:
        assert "out of step" in found["uneven"] or "not the same on every rank" in found["uneven"], found["uneven"]


# --- the ways people write them

DRAW = torch.Generator().manual_seed(0)
IMAGES, LABELS = torch.randn(60, 1, 6, 6, generator=DRAW), torch.randint(0, 3, (60,), generator=DRAW)
ROWS = [slice(i, i + 12) for i in range(0, 60, 12)]


class Net(nn.Module):
    """A convolution, BatchNorm, dropout, two layers of which one may be tied to another."""

    def __init__(self, tied: bool = False):
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.1), nn.Flatten())
        self.middle, self.last = nn.Linear(64, 64), nn.Linear(64, 3)
        self.again = nn.Linear(64, 64)
        if tied:
            self.again.weight = self.middle.weight

    def forward(self, images):
        return self.last(self.again(self.middle(self.first(images)).tanh()).tanh())


def solved(model: nn.Module, make, *, params=None, forward=None, hook=None, iterations: int = 2, batches=ROWS):
    """A few iterations with class weights above; the records and the problem."""
    forward = forward or model
    x = torch.zeros(3, requires_grad=True)
    params = list(model.parameters()) if params is None else params

    def lower(rows):
        rows = rows if isinstance(rows, list) else [rows]
        losses = [cross_entropy(forward(IMAGES[own]), LABELS[own], reduction="none") for own in rows]
        return sum((3 * x.softmax(0)[LABELS[own]] * loss).mean() for own, loss in zip(rows, losses, strict=True)) / len(
            rows
        )

    problem = bisls.Bilevel(lambda rows: cross_entropy(forward(IMAGES[rows]), LABELS[rows]), lower, [x], params)
    optimizer = make(params)
    if hook is not None:
        optimizer.register_step_pre_hook(hook)
    solver = bisls.BiSLS(problem, lower_optimizer=optimizer)
    return [solver.step(ROWS[0], list(batches)) for _ in range(iterations)], problem, solver, optimizer


def adamw(params):
    return torch.optim.AdamW(params, lr=1e-2)


def frozen() -> nn.Module:
    model = Net()
    model.middle.requires_grad_(False)
    return model


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def decayed(params):
    """Decay for matrices alone."""
    flat = [p for p in params if p.ndim < 2]
    return torch.optim.AdamW(
        [{"params": [p for p in params if p.ndim > 1]}, {"params": flat, "weight_decay": 0.0}], lr=1e-2
    )


class Lion(torch.optim.Optimizer):
    """An optimiser of somebody's own that counts its steps in an attribute, and moves along signs where it is told to."""

    def __init__(self, params, lr=1e-2, signs=True):
        super().__init__(params, {"lr": lr})
        self.signs, self.steps = signs, 0

    @torch.no_grad()
    def step(self, closure=None):
        self.steps += 1
        for group in self.param_groups:
            for p in group["params"]:
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                way = m * 0.9 + p.grad * 0.1
                p.sub_(group["lr"] * (way.sign() if self.signs else way / (way.abs() + 0.1)))
                m.lerp_(p.grad, 0.01)


OTHERS = ("NAdam", "RAdam", "Adagrad", "Adamax", "Adadelta", "ASGD", "Adafactor")
WAYS = {
    "a frozen layer": lambda: solved(model := frozen(), adamw, params=trainable(model)),
    "a frozen layer in the optimiser": lambda: solved(
        model := frozen(), lambda _: adamw(model.parameters()), params=trainable(model)
    ),
    "tied weights": lambda: solved(Net(tied=True), adamw),
    "groups": lambda: solved(Net(), decayed),
    "channels last": lambda: solved(Net().to(memory_format=torch.channels_last), adamw),
    "in eval": lambda: solved(Net().eval(), adamw),
    "fused": lambda: solved(Net(), lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True)),
    "a rate in a tensor": lambda: solved(Net(), lambda params: torch.optim.AdamW(params, lr=torch.tensor(1e-2))),
    "clipping": lambda: solved(
        model := Net(), adamw, hook=lambda *_: torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    ),
    "accumulation": lambda: solved(Net(), adamw, batches=[ROWS[:2], ROWS[2:4]]),
    "his own": lambda: solved(Net(), lambda params: Lion(params, signs=False)),
    **{
        name: lambda name=name: solved(Net(), getattr(torch.optim, name))
        for name in OTHERS
        if hasattr(torch.optim, name)
    },
}


@pytest.mark.parametrize("way", WAYS)
def test_it_may_be_written_so(way):
    torch.manual_seed(0)
    records, problem, _, optimizer = WAYS[way]()
    assert {record.status for record in records} == {Status.OK}
    assert {record.view for record in records} == {"t-step"}
    assert all(record.hypergrad_norm > 0 and record.alpha > 0 for record in records)
    assert problem.x.read().any()
    if way == "his own":
        assert optimizer.steps == 2 * len(ROWS)  # those that were only tried, or repeated, are not in it


def test_signs_that_cannot_be_differentiated_are_said_and_nothing_moves():
    torch.manual_seed(0)
    model = Net()
    before = [p.detach().clone() for p in (*model.parameters(), *model.buffers())]
    with pytest.raises(ValueError, match=r"cannot be differentiated: .*Lion.*hypergrad=Implicit\(\)"):
        solved(model, Lion)
    assert all(torch.equal(p, own) for p, own in zip((*model.parameters(), *model.buffers()), before, strict=True))


@pytest.mark.parametrize("what", ["part", "more"])
def test_an_optimiser_over_other_parameters_is_refused(what):
    model = Net()
    params = list(model.parameters())
    some = params[:2] if what == "part" else params
    with pytest.raises(
        ValueError, match="the optimiser lacks 8 of the 10" if what == "part" else "has 1 parameters that are not"
    ):
        solved(model, lambda _: adamw(some), params=params if what == "part" else params[1:])


def test_an_empty_last_batch_is_said_and_nothing_is_spoilt(recwarn):
    """Its mean is not a number; a script of one level would have lost its weights by it, and BatchNorm its statistics."""
    model = nn.Sequential(nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(36, 3))
    records, problem, *_ = solved(model, adamw, batches=[*ROWS, slice(60, 60)], iterations=3)
    assert {record.lower_status for record in records} == {Status.NON_FINITE}
    assert "an empty batch" in records[-1].advice
    assert torch.isfinite(problem.y.read()).all()
    assert all(torch.isfinite(own).all() for own in model.buffers())


# --- saved by hand, and by `fit` with nothing said of modules


def made():
    torch.manual_seed(0)
    model = Net()
    _, problem, solver, optimizer = solved(model, adamw, iterations=0)
    return model, problem, solver, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4), optimizer


def test_a_loop_of_ones_own_is_resumed_to_the_last_bit():
    """The solver's state holds the optimiser's; parameters, the schedule and random numbers are saved as ever."""
    ends = []
    for cut in (False, True):
        model, problem, solver, schedule, optimizer = made()
        for k in range(4):
            solver.step(ROWS[k], list(ROWS))
            schedule.step()
            if cut and k == 1:
                file = io.BytesIO()
                own = {"model": model, "solver": solver, "schedule": schedule}
                torch.save({**{name: it.state_dict() for name, it in own.items()}, "x": problem.x.read()}, file)
                random = torch.get_rng_state()
                model, problem, solver, schedule, optimizer = made()
                file.seek(0)
                saved = torch.load(file, weights_only=True)
                model.load_state_dict(saved["model"])
                solver.load_state_dict(saved["solver"])
                schedule.load_state_dict(saved["schedule"])
                problem.x.write_(saved["x"])
                torch.set_rng_state(random)
        ends.append([*kept(model, optimizer), problem.x.read(), torch.get_rng_state()])
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.0)
    assert all(torch.equal(one, two) for one, two in zip(*ends, strict=True))


def test_statistics_are_in_the_checkpoint_of_a_run(tmp_path):
    ends = []
    for steps in (4, 2, 4):
        model, problem, solver, *_ = made()
        path = tmp_path / ("whole.pt" if not ends else "cut.pt")
        data = {"upper_data": DataLoader(torch.arange(60), 12), "lower_data": DataLoader(torch.arange(60), 12)}
        bisls.fit(solver, **data, steps=steps, checkpoint=path, resume=True, progress=False)
        ends.append([own.clone() for own in (*model.buffers(), problem.x.read(), problem.y.read())])
    assert all(torch.equal(one, two) for one, two in zip(ends[0], ends[2], strict=True))
    assert not torch.equal(ends[0][0], ends[1][0])


# --- a rate that is far too large


class Plain(nn.Sequential):
    """No BatchNorm that would hide it."""

    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(36, 24), nn.ReLU(), nn.Linear(24, 3))


def kept(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """All that must not be spoilt: parameters, statistics, what the optimiser holds."""
    held = [own for state in optimizer.state.values() for own in state.values() if isinstance(own, torch.Tensor)]
    return [own.detach().clone() for own in (*model.parameters(), *model.buffers(), *held)]


ASTRAY = {
    "SGD, 100": (Plain, lambda p: torch.optim.SGD(p, 100.0), Status.LOWER_LOST),
    "SGD, 1e6, BatchNorm": (Net, lambda p: torch.optim.SGD(p, 1e6, momentum=0.9), Status.LOWER_LOST),
    "SGD, 1e30": (Plain, lambda p: torch.optim.SGD(p, 1e30), Status.NON_FINITE),
    "Adam, 3: dead": (Plain, lambda p: torch.optim.Adam(p, 3.0), Status.LOWER_LOST),
}


@pytest.mark.parametrize("case", ASTRAY)
def test_a_rate_that_is_far_too_large_is_undone_and_said(case):
    make, by, status = ASTRAY[case]
    torch.manual_seed(0)
    model = make()
    before = [own.detach().clone() for own in (*model.parameters(), *model.buffers())]
    records, problem, solver, optimizer = solved(model, by, iterations=3)
    assert {record.status for record in records} == {status}
    assert "rate" in records[-1].advice
    assert all(
        torch.equal(own, then) for own, then in zip((*model.parameters(), *model.buffers()), before, strict=True)
    )
    assert not problem.x.read().any()
    for _ in range(16):
        solver.step(ROWS[0], list(ROWS))
    with pytest.raises(bisls.SolverError, match=r"20 iterations in a row .*rate") as failed:
        solver.step(ROWS[0], list(ROWS))
    assert failed.value.record.status is status
    optimizer.param_groups[0]["lr"] = 0.01  # it goes on as if nothing had been
    record = solver.step(ROWS[0], list(ROWS))
    assert record.status is Status.OK
    assert record.alpha > 0


def test_one_bad_loop_costs_one_loop():
    """The third iteration has a rate of 1e3; the others are not touched by it, nor is what the optimiser holds."""
    torch.manual_seed(0)
    model = Plain()
    records, problem, solver, optimizer = solved(model, adamw)
    good, x = kept(model, optimizer), problem.x.read()
    optimizer.param_groups[0]["lr"] = 1e3
    assert solver.step(ROWS[0], list(ROWS)).status is Status.LOWER_LOST
    optimizer.param_groups[0]["lr"] = 1e-2
    assert all(torch.equal(own, then) for own, then in zip(kept(model, optimizer)[:4], good[:4], strict=True))
    assert torch.equal(problem.x.read(), x)
    after = solver.step(ROWS[0], list(ROWS))
    assert after.status is Status.OK
    assert after.lower_value < records[0].lower_value
    assert max(own.abs().max() for own in kept(model, optimizer)) < 1e3  # Adam's mean of squares was put back as well


def test_a_loss_that_rises_a_little_is_left_alone():
    """Steps at the edge: the loss wavers, and nothing is undone."""
    torch.manual_seed(0)
    records, *_ = solved(Plain(), lambda p: torch.optim.SGD(p, 2.0), iterations=6)
    assert Status.LOWER_LOST not in {record.status for record in records}
    values = [record.lower_value for record in records]
    assert max(values[1:]) > 1.5 * values[0] > 1.5 * values[-1]
