"""The comparison with other libraries: its driver on a small problem, and its page from made-up rows. No test of time."""

from __future__ import annotations

import json
import sys
from math import isfinite
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).parents[1]
BENCHMARKS = ROOT / "benchmarks"


@pytest.fixture
def parts(monkeypatch):
    """The modules of the benchmark, which is no package."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from side_by_side import contestants, environments, page, problems, runs

    return {"contestants": contestants, "environments": environments, "page": page, "problems": problems, "runs": runs}


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


def made_up(peer, variant, final=0.1, arrival=None, nan=None, error="", problem="plain", rates=(0.1, 0.2), **more):
    arrivals = [arrival] if problem == "plain" else [arrival, arrival]
    curve = {"iterations": [0, 200], "wall": [1.0, 3.0], "values": [0.2628, final]}
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
        made_up("bisls", "representation BiSLS", 0.96, at, problem="representation"),
        made_up("betty", "representation CG", None, nan=6, problem="representation", rates=(1e-3, 0.03)),
        made_up("torchopt", "representation CG", 0.9, later, problem="representation", rates=(1e-3, 0.03)),
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
    assert "1.50, 4.00 (3.0 s)" in lines["TorchOpt: CG"]
    assert "commit abc" in text
    for name in ("plain", "representation"):
        assert f"](plots/field-{name}.png)" in text
        assert (tmp_path / "plots" / f"field-{name}.png").stat().st_size > 1000


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
