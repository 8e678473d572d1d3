"""The comparison with other libraries: its driver on a small problem, what workers compute, and its page from made-up rows.

No test of time.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import isfinite
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from bisls import data
from bisls.tasks.few_shot import stacked

ROOT = Path(__file__).parents[1]
BENCHMARKS = ROOT / "benchmarks"


@pytest.fixture
def parts(monkeypatch):
    """The modules of the benchmark, which is no package."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from side_by_side import contestants, environments, networks, page, problems, runs

    return {
        "contestants": contestants, "environments": environments, "networks": networks, "page": page,
        "problems": problems, "runs": runs,
    }  # fmt: skip


@pytest.fixture
def field(parts, monkeypatch):
    """The command, in this process: importing torch once more would take longer than all the rest."""
    import field as command

    threads = torch.get_num_threads()

    def call(out: Path, *arguments: str) -> None:
        monkeypatch.setattr(sys, "argv", ["field.py", "--out", str(out), *arguments])
        command.main()

    yield call
    torch.set_num_threads(threads)


def rows_of(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "field.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_driver_runs_workers_scores_them_and_goes_on_where_it_stopped(tmp_path, field):
    small = ("--problems", "tiny", "--peers", "bisls", "torch", "--variants", "BiSLS", "CG", "--here", "--quick")
    field(tmp_path, *small)
    rows = rows_of(tmp_path)
    assert [row["kind"] for row in rows] == ["facts", "reference", "run", "run"]
    facts, reference, ours, plain = rows
    assert facts["cores"] >= 1
    assert facts["python"] == sys.version.split()[0]
    assert 0 < reference["F"] < reference["F0"]
    for row in (ours, plain):
        assert (row["done"], row["error"], row["nan"]) == (10, "", None)
        assert isfinite(row["final"])
        assert row["curve"]["iterations"] == list(range(11))
        assert row["curve"]["values"][0] == pytest.approx(reference["F0"])
        wall = row["curve"]["wall"]
        assert wall == sorted(wall)
        assert 0 < wall[0] <= wall[-1] <= row["wall"]
    assert ours["final"] < plain["final"]
    assert "bisls: BiSLS" in (tmp_path / "field.md").read_text()
    assert (tmp_path / "field-tiny.png").stat().st_size > 1000

    with (tmp_path / "field.jsonl").open("a") as file:
        file.write('{"kind": "run", "torn')  # a command that was killed while writing
    field(tmp_path, *small)
    again = [json.loads(line) for line in (tmp_path / "field.jsonl").read_text().splitlines() if line.endswith("}")]
    assert [row["kind"] for row in again] == ["facts", "reference", "run", "run", "facts"]


def test_an_environment_that_cannot_be_made_is_a_reason(parts, tmp_path):
    Environment, made = parts["contestants"].Environment, parts["environments"].made
    Refused = parts["environments"].Refused
    with pytest.raises(Refused, match="no_such_module_at_all"):
        made("missing", Environment((), "no_such_module_at_all"), tmp_path)
    assert not (tmp_path / "missing").exists()
    python = made("empty", Environment((), "json"), tmp_path)
    written = (tmp_path / "empty" / "made-of.txt").stat().st_mtime_ns
    assert made("empty", Environment((), "json"), tmp_path) == python
    assert (tmp_path / "empty" / "made-of.txt").stat().st_mtime_ns == written


def test_reason_is_the_line_that_says_something(parts):
    reason = parts["environments"].reason
    assert reason("WARNING: x\nERROR: No matching distribution found for a==1\n[notice] new pip\n") == (
        "No matching distribution found for a==1"
    )
    assert reason("Traceback (most recent call last):\n  File x\nImportError: undefined symbol\n\n") == (
        "ImportError: undefined symbol"
    )
    assert reason("") == ""


def test_a_child_does_not_outlive_its_limit(parts):
    with pytest.raises(parts["environments"].Refused, match="longer than"):
        parts["environments"].ended([sys.executable, "-c", "import time; time.sleep(60)"], limit=0.2)
    with pytest.raises(parts["environments"].Refused, match="no/such/python"):
        parts["environments"].ended(["/no/such/python"], limit=1)


def test_a_worker_that_fails_is_a_row(parts, tmp_path):
    Job, run = parts["runs"].Job, parts["runs"].run
    problem = parts["problems"].PROBLEMS["tiny"]
    problem.write(tmp_path / "tiny.npz")
    job = Job("tiny", "higher", "no such variant", 0.1, 0.2, 5, 10.0)
    row = run(job, problem, tmp_path / "tiny.npz", Path(sys.executable), [0.1], 1)
    assert row["error"]
    assert (row["done"], row["final"], row["arrivals"]) == (0, None, [None])


def test_arrival_is_where_the_goal_is_kept(parts):
    _arrival, thinned = parts["problems"]._arrival, parts["problems"].thinned
    values = [9.0, 8.0, 1.0, 7.0, 6.0, 1.0, 1.0, 0.5, 0.4]

    def found(goal, indices):
        known = {i: values[i] for i in indices}
        return _arrival(lambda i: values[i], known, goal)

    assert found(2.0, range(9)) == 5  # not 2, after which it rose again
    assert found(2.0, [0, 4, 8]) == 5  # by bisection
    assert found(0.1, range(9)) is None
    assert found(10.0, range(9)) == 0
    assert thinned(0) == []
    assert thinned(1) == [0]
    schedule = thinned(2001)
    assert schedule[:20] == list(range(20))
    assert schedule[-1] == 2000
    assert len(schedule) < 150


def test_exact_gradient_of_the_reference(parts):
    problem = parts["problems"].PROBLEMS["tiny"]
    point, step = np.array([0.3, -1.0, 0.5, 2.0, -0.2]), 1e-5
    value, gradient, _ = problem.value_and_gradient(point)
    assert value == pytest.approx(problem.exact(point)[0])
    assert np.linalg.norm(gradient) > 1e-3
    for k, unit in enumerate(np.eye(5)):
        slope = (problem.exact(point + step * unit)[0] - problem.exact(point - step * unit)[0]) / (2 * step)
        assert gradient[k] == pytest.approx(slope, abs=1e-7)


@pytest.fixture
def workers(parts, monkeypatch):
    """What workers run, in this process."""
    monkeypatch.syspath_prepend(str(parts["contestants"].WORKERS))
    threads = torch.get_num_threads()
    import bisls_ as ours
    import torch_ as plain
    import torch_problems
    from work import Over

    yield SimpleNamespace(ours=ours, plain=plain, problems=torch_problems, Over=Over)
    torch.set_num_threads(threads)


def points(run: Callable, job: SimpleNamespace, over: type[Exception], iterations: int) -> np.ndarray:
    """The unknowns at the start and after each iteration."""
    found: list[np.ndarray] = []

    def keep(*tensors: np.ndarray) -> None:
        found.append(np.concatenate([np.array(tensor, dtype=np.float32).ravel() for tensor in tensors]))
        if len(found) > iterations:
            raise over

    with pytest.raises(over):
        run(job, keep)
    return np.array(found)


@pytest.fixture
def few_shots(parts, monkeypatch):
    """The few-shot problem on made-up drawings of 6 x 6: 40 characters, 8 of each."""
    draw = np.random.RandomState(3)
    shapes = np.repeat(draw.randint(0, 200, (40, 6, 6)), 8, axis=0)
    images = (shapes + draw.randint(0, 56, shapes.shape)).astype(np.uint8)
    found = SimpleNamespace(x=images, y=np.repeat(np.arange(40), 8))
    monkeypatch.setattr(data, "load", lambda name: {"omniglot": found}[name])
    sizes = {"iterations": 3, "race": None, "batch": 2, "queries": 2, "hidden": 7, "choosing": 5, "judging": 6}
    return replace(parts["problems"].PROBLEMS["few-shot"], **sizes)


def job_of(problem, path: Path, alpha: float, beta: float) -> SimpleNamespace:
    return SimpleNamespace(
        **problem.job(), problem=str(path), threads=1, contest=problem.kind, iterations=3, alpha=alpha, beta=beta
    )


def test_maml_in_plain_torch_and_looking_back_are_the_same_numbers(workers, few_shots, tmp_path):
    few_shots.write(tmp_path / "tasks.npz")
    job = job_of(few_shots, tmp_path / "tasks.npz", 0.01, 0.3)
    plain = points(workers.plain.maml, job, workers.Over, 3)
    ours = points(workers.ours.few_shot(workers.ours.looking_back), job, workers.Over, 3)
    way = np.linalg.norm(plain - plain[0], axis=1)
    assert way[1] > 0.1
    assert (np.linalg.norm(ours - plain, axis=1) < 1e-4 * (way + 1e-9)).all()
    by_steps = workers.ours.few_shot(workers.ours.same_steps)
    assert np.isfinite(points(by_steps, job, workers.Over, 2)).all()


def test_new_tasks_are_learnt_as_by_networks_written_out(few_shots):
    choose, judge = few_shots._judges
    draw = torch.Generator().manual_seed(4)
    shapes = [(7, 36), (7,), (7, 7), (7,), (5, 7), (5,)]
    x = [0.4 * torch.randn(shape, generator=draw) for shape in shapes]
    shots = judge.inputs[:, : judge.shots]
    own = [tensor.expand(6, *tensor.shape).clone().requires_grad_() for tensor in x]
    for _ in range(few_shots.lower_iters):
        loss = torch.nn.functional.cross_entropy(
            stacked(own, shots).flatten(0, 1), judge.labels.flatten(), reduction="sum"
        )
        slopes = torch.autograd.grad(loss / judge.shots, own)
        own = [(tensor - 0.1 * slope).detach().requires_grad_() for tensor, slope in zip(own, slopes, strict=True)]
    with torch.no_grad():
        expected = stacked(own, judge.inputs)
        before = stacked([tensor.expand(6, *tensor.shape) for tensor in x], judge.inputs)
    found = judge.outputs(x, 0.1)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert (expected - before).abs().max() > 0.1
    assert not np.isin(choose.inputs.numpy(), judge.inputs.numpy()).all()


@pytest.mark.parametrize("name", ["weight-network", "sample-weights"])
def test_reweighting_in_the_workers_is_the_task(parts, workers, monkeypatch, tmp_path, name):
    draw = np.random.RandomState(5)
    labels = draw.randint(0, 3, 400)
    images = (60 * labels[:, None, None] + draw.randint(0, 100, (400, 8, 8))).astype(np.uint8)
    monkeypatch.setattr(data, "load", lambda _: SimpleNamespace(train_x=images, train_y=labels))
    problem = parts["problems"].PROBLEMS[name]
    made = partial(problem.make.func, corrupted=0.5, train=200, validation=100, test_size=50)
    problem = replace(problem, make=made, batch=10, lower_iters=2)
    problem.write(tmp_path / "arrays.npz")
    job = job_of(problem, tmp_path / "arrays.npz", 0.0, 0.01)
    mine, task = workers.problems.Reweighting(job), problem._task
    tensors = (*task.problem.x.tensors, *task.problem.y.tensors)
    start = torch.cat([tensor.detach().flatten() for tensor in tensors]).numpy()
    assert np.array_equal(np.concatenate([own.ravel() for own in mine.point()]), start)
    for _ in range(25):  # past the end of an epoch
        batch, theirs = next(mine.lower_batches), next(task.lower_data)
        assert all(map(torch.equal, batch, theirs))
        assert all(map(torch.equal, next(mine.upper_batches), next(task.upper_data)))
    assert torch.equal(mine.lower(mine.network, batch), task.problem.lower_loss(theirs))

    plain = points(workers.plain.plain_training, job, workers.Over, 2)
    size = sum(tensor.numel() for tensor in task.problem.x.tensors)
    assert np.array_equal(plain[-1][:size], start[:size])
    assert not np.array_equal(plain[-1][size:], start[size:])
    ours = points(workers.ours.REWEIGHTING["BiSLS, AdamW below"], job, workers.Over, 2)
    assert np.isfinite(ours).all()
    assert not np.array_equal(ours[-1][size:], start[size:])
    measures = problem.measure(ours[-1])
    assert 0 <= measures["accuracy"] <= 1
    assert 0 <= measures["auc"] <= 1
    now = torch.cat([tensor.detach().flatten() for tensor in tensors]).numpy()
    assert np.array_equal(now, ours[-1])


def test_who_takes_the_rates_of_others_names_one_that_is_tuned(parts):
    contestants = parts["contestants"]
    borrowed = 0
    for peer in contestants.PEERS.values():
        for kind, variants in peer.contests.items():
            for variant in variants:
                if variant.tuned_as:
                    borrowed += 1
                    other, name = variant.tuned_as
                    (found,) = (v for v in contestants.PEERS[other].variants(kind) if v.name == name)
                    assert found.grid == variant.grid
                    assert not found.tuned_as
    assert borrowed > 0


def test_accuracy_at_the_end_is_a_mean_and_late_points_are_thinned_out(parts):
    class Counted(parts["networks"].FewShot):
        def measure(self, point):
            seen.append(int(point[0]))
            return {"accuracy": float(point[0]) / 1000, "rate": 0.1}

    seen: list[int] = []
    kept = np.arange(0, 1001, 20)
    found = Counted(iterations=300).score(kept, kept[:, None].astype(np.float32), [0.06, 2.0])
    assert seen[:16] == list(range(0, 301, 20))
    assert seen[-3:] == [960, 980, 1000]
    assert len(seen) < len(kept)
    assert found["final"] == pytest.approx(0.98)
    assert found["arrivals"] == [60, None]
    assert found["measures"] == {"accuracy": 1.0, "rate": 0.1}
    broken = kept[:, None].astype(np.float32)
    broken[-1] = np.nan
    assert not isfinite(Counted(iterations=300).score(kept, broken, [0.06])["final"])


def made_up(peer, variant, final=0.1, arrival=None, nan=None, error="", problem="plain", rates=(0.1, 0.2), **more):
    arrivals = [arrival] if problem == "plain" else [arrival, arrival]
    curve = {"iterations": [0, 200], "wall": [1.0, 3.0], "cpu": [1.0, 2.5], "values": [0.2628, final]}
    row = {"kind": "run", "problem": problem, "peer": peer, "variant": variant, "alpha": rates[0], "beta": rates[1]}
    row |= {"iterations": 200, "repeat": 0, "error": error, "wall": 4.0, "done": 200, "final": final, "nan": nan}
    row |= {"ready": [1.0, 1.0], "first": [0.1, 0.1], "each": [0.01, 0.01], "arrivals": arrivals, "curve": curve}
    return row | {"versions": {"torch": "2.13.0"}, "session": "now"} | more


def test_page_from_made_up_rows(parts, tmp_path):
    at = {"wall": 2.0, "cpu": 1.0, "iteration": 40}
    later = {"wall": 3.0, "cpu": 4.0, "iteration": 150}
    rows = [
        {"kind": "facts", "started": "now", "commit": "abc", "python": "3.11", "torch": "2.13.0", "system": "Linux",
         "processor": "P", "cores": 2, "threads": 1},
        {"kind": "reference", "problem": "plain", "F": 0.08, "F0": 0.2628},
        {"kind": "skipped", "environment": "hypertorch", "reason": "no | network"},
        {"kind": "skipped", "environment": "higher", "reason": "for a while"},
        {"kind": "made", "environment": "higher"},
        {"kind": "left out", "problem": "w8a", "reason": "no data"},
        made_up("bisls", "BiSLS", 0.0816, at),
        made_up("torch", "CG", 0.096),
        made_up("torch", "CG", 0.082, later, rates=(1.0, 0.2)),
        made_up("torch", "CG", None, nan=31, rates=(1.0, 2.0)),
        made_up("betty", "Neumann", None, nan=65),
        made_up("higher", "unrolled", 0.1026),
        made_up("jaxopt", "Armijo", None, error="a | b broke", done=0, curve=None, each=None, rates=(0.1, 1.0)),
        made_up("bisls", "BiSLS", 0.96, at, problem="representation"),
        made_up("betty", "CG", None, nan=6, problem="representation", rates=(1e-3, 0.03)),
        made_up("torchopt", "CG", 0.9, later, problem="representation", rates=(1e-3, 0.03)),
        made_up("bisls", "BiSLS", 0.8, at, problem="few-shot", iterations=200, measures={"rate": 0.1}),
        made_up("bisls", "BiSLS", 0.84, at, problem="few-shot", iterations=2000),
        made_up("torch", "MAML", 0.75, later, problem="few-shot", rates=(1e-3, 0.3), iterations=200),
        made_up("learn2learn", "MAML", 0.74, problem="few-shot", rates=(1e-3, 0.3), iterations=200),
        made_up("bisls", "BiSLS", 0.8, at, problem="sample-weights", iterations=150, measures={"auc": 0.912}),
        made_up("torch", "plain training", 0.7, problem="sample-weights", rates=(0.0, 0.003), iterations=150),
    ]  # fmt: skip
    text = parts["page"].render(rows, tmp_path / "plots", "plots/")
    lines = {line.split("|")[1].strip(): line for line in text.splitlines() if line.startswith("| ")}
    assert "1.020 (0.0816) | 1.00, 1.00 (2.0 s)" in text
    assert "| plain torch: CG | 1.200 (0.0960) | never in 200 iterations (4.0 s) |" in text
    assert "1 / 0.2 | 1.025 (0.0820) | 1.50, 4.00 (3.0 s) | 3 runs, 6.00 (12.0 s) | 1 | 7.50 (15.0 s)" in text
    assert "| Betty: Neumann | NaN after 65 iterations | never: NaN |" in text
    assert "| jaxopt: Armijo | failed: a / b broke | never: stopped |" in text
    assert "left out: no / network" in lines["hypertorch"]
    assert "left out" not in lines["higher"]
    assert "Problem w8a was left out: no data." in text
    assert "112,640" in text  # 40 iterations x 11 batches x 256
    assert "never: NaN" in lines["Betty: CG"]
    assert "4.00 (4.0 s; wall 3.0 s)" in lines["TorchOpt: CG"]
    assert "1 of 12 pairs of rates, 0 NaN or stopped | 2.50 (2.5 s; wall 4.0 s) |" in lines["TorchOpt: CG"]
    assert "commit abc" in text
    assert "80.0 % | 55.1 % (200) | 10 ms | none |" in text  # the mean of the two points of the longer run
    assert "| as plain torch: MAML |" in lines["learn2learn: MAML"]
    assert "4.00 (4.0 s; wall 3.0 s) | 1,200 |" in lines["plain torch: MAML"]  # 150 iterations of 8 tasks
    assert "| none / 0.003 | never in 200 iterations |" in lines["plain torch: plain training"]
    assert "80.0 % | 0.912 |" in text
    for name in ("plain", "representation", "few-shot", "sample-weights"):
        assert f"](plots/field-{name}.png)" in text
        assert (tmp_path / "plots" / f"field-{name}.png").stat().st_size > 1000


def test_a_page_keeps_what_was_not_measured_again(parts, tmp_path):
    render = parts["page"].render
    first = [
        {"kind": "reference", "problem": "plain", "F": 0.08, "F0": 0.2628},
        made_up("bisls", "BiSLS", 0.0816),
        made_up("torch", "CG", 0.096),
        made_up("bisls", "BiSLS", 0.96, problem="representation"),
        made_up("torchopt", "unrolled", 0.9, problem="representation", rates=(1e-3, 0.01)),
    ]
    page = render(first, tmp_path, "")
    notes = "<!-- notes -->\n\nsaid by hand\n\n<!-- end of notes -->\n"
    earlier = "<!-- representation, earlier -->\n\nan old table\n\n<!-- end of representation, earlier -->\n"
    page += notes + earlier
    assert render([], tmp_path, "", page).count("1.020 (0.0816)") == page.count("1.020 (0.0816)") > 0
    again = render([made_up("bisls", "BiSLS", 0.97, problem="representation")], tmp_path, "", page)
    assert "97.0 %" in again
    assert "96.0 % |" in again.partition("<!-- plain -->")[0]  # alone, it makes no row of the summary
    assert "96.0 %" not in again.partition("<!-- representation -->")[2]
    assert "plain torch: CG | 1.200 (0.0960)" in again
    assert notes in again
    assert again.index("97.0 %") < again.index("an old table") < again.index("Who took part")
    assert "| TorchOpt | torch 2.13.0 |" in again
    assert render([], tmp_path, "", again) == again


def test_page_command_and_no_rows(tmp_path, parts, field):
    assert parts["page"].render([], tmp_path, "").startswith("# Side by side")
    rows = [{"kind": "reference", "problem": "plain", "F": 0.08, "F0": 0.2628}, made_up("bisls", "BiSLS")]
    (tmp_path / "field.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    field(tmp_path, "--page", str(tmp_path / "docs" / "field.md"))
    assert "1.250 (0.1000)" in (tmp_path / "docs" / "field.md").read_text()
    assert (tmp_path / "docs" / "plots" / "field-plain.png").exists()


def test_every_contestant_has_a_worker_and_an_environment(parts):
    contestants = parts["contestants"]
    for peer in contestants.PEERS.values():
        text = (contestants.WORKERS / peer.worker).read_text()
        assert peer.environment in contestants.ENVIRONMENTS
        assert ("import bisls" in text) == peer.ours
    for environment in contestants.ENVIRONMENTS.values():
        names = [part for call in environment.installs for part in call if not part.startswith(("-", "/", "https://"))]
        assert all("==" in name or name == "torch" for name in names), names
