"""The benchmark commands run from end to end at their quick size, and write what a reader needs. No test of time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from math import isfinite
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]


def run(script: str, out: Path, *arguments: str) -> dict:
    call = [sys.executable, str(ROOT / "benchmarks" / f"{script}.py"), *arguments, "--out", str(out)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(call, capture_output=True, text=True, cwd=ROOT, env=environment, check=False, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads((out / f"{script}.json").read_text())
    assert found["facts"]["torch"] == torch.__version__
    assert found["facts"]["python"] == sys.version.split()[0]
    assert isinstance(found["facts"]["commit"], str)
    assert found["facts"]["commit"] or not (ROOT / ".git").exists()
    assert (out / f"{script}.md").read_text().startswith(("|", "#"))
    return found


def test_regret_with_networks_has_every_rival_and_goes_on_where_it_stopped(tmp_path):
    found = run("regret_networks", tmp_path, "--quick", "--jobs", "1", "--tasks", "sample weights", "few-shot")
    results = found["results"]
    assert {name: set(own["rivals"]) for name, own in results.items()} == {
        "sample weights": {"plain", "implicit", "lookahead"},
        "few-shot": {"first", "lookahead"},
    }
    for own in results.values():
        assert own["developed"]
        for rival in own["rivals"].values():
            (final,) = rival["runs"]
            assert final["score"] < final["start"]
            assert final["seconds"] == final["curve"][-1][0] > 0
        best = own["rivals"][own["best"]]["runs"][0]
        assert own["regrets"] == [pytest.approx(own["bisls"][0]["score"] / best["score"])]
        assert best["score"] == min(rival["runs"][0]["score"] for rival in own["rivals"].values())
    weights = results["sample weights"]
    assert all(isfinite(row["retrained"]) for row in (*weights["bisls"], *weights["rivals"]["plain"]["runs"]))
    kept = (tmp_path / "regret_networks.jsonl").read_text()
    again = run("regret_networks", tmp_path, "--quick", "--jobs", "1", "--tasks", "sample weights", "few-shot")
    assert again["results"] == results
    assert (tmp_path / "regret_networks.jsonl").read_text() == kept


@pytest.fixture(scope="module")
def scaling(tmp_path_factory):
    out = tmp_path_factory.mktemp("scaling")
    found = run("scaling", out, "--quick")
    assert (out / "scaling.png").stat().st_size > 1000
    return found["results"]


def test_scaling_counts_what_an_iteration_evaluates(scaling):
    for row in scaling["overhead"].values():
        ours, usual = row["BiSLS"], row["Alternating"]
        assert row["ratio"] > 0
        assert usual["evaluations"]["lower_gradients"] == 10
        assert usual["evaluations"]["lower_values"] == usual["evaluations"]["upper_values"] == 0
        assert ours["evaluations"]["lower_gradients"] >= 10
        assert ours["evaluations"]["upper_values"] == pytest.approx(ours["upper_checks"])
        for method in (ours, usual):
            assert sum(method["shares"].values()) == pytest.approx(1.0)
            assert min(method["shares"].values()) > -0.01
    assert scaling["overhead"]["same CG"]["Alternating"]["evaluations"]["hessian_products"] == 10


def test_scaling_measures_sizes_and_loops(scaling):
    for level in ("upper", "lower"):
        rows = scaling["sizes"][level]["rows"]
        assert [row["n"] for row in rows] == [10**4, 10**5]
        assert all(row["seconds"] > 0 and row["peak_bytes"] >= 0 and row["failed"] == 0 for row in rows)
        assert isfinite(scaling["sizes"][level]["exponent"])
        # the number of evaluations does not grow with the number of parameters
        products = [row["evaluations"]["hessian_products"] for row in rows]
        assert max(products) <= 1.5 * min(products)
    for name in ("lower_iters", "cg_steps"):
        assert scaling["loops"][name]["n"] == [2, 4, 8]
    gradients = [each["lower_gradients"] for each in scaling["loops"]["lower_iters"]["evaluations"]]
    assert gradients == sorted(gradients)
    assert gradients[-1] - gradients[0] == pytest.approx(6, abs=2)
    products = [each["hessian_products"] for each in scaling["loops"]["cg_steps"]["evaluations"]]
    assert products == sorted(products)
    assert products[-1] >= products[0] + 6
    for each in scaling["loops"].values():
        assert all(size > 0 for size in each["peak_bytes"])
        # nothing is kept from one lower or CG step to the next; what is freed late differs a little from run to run
        assert max(each["copies"]) <= 1.5 * min(each["copies"])


def test_scaling_runs_one_and_two_processes_to_the_same_end(scaling):
    found = scaling["processes"]
    assert [row["processes"] for row in found["rows"]] == [1, 2]
    assert all(row["seconds"] > 0 and row["cpu_seconds"] > 0 and row["failed"] == 0 for row in found["rows"])
    assert found["ranks_equal"]  # to the last bit
    assert 0 < found["apart"] < 1e-6  # other sums, so not to the last bit; relative to the way from the start
    assert found["ratio"] == pytest.approx(found["ratios"][0])


def test_time_has_every_method_and_goes_on_where_it_stopped(tmp_path):
    found = run("time", tmp_path, "--quick", "--tasks", "ridge", "image", "--sizes")
    for own in found["results"].values():
        assert set(own["methods"]) == {"BiSLS", "forgetful", "L-BFGS", "tuned"}
        assert all(row["F"] >= own["best"] > 0 for row in own["methods"].values())
        assert own["methods"]["BiSLS"]["F"] < own["methods"]["BiSLS"]["trace"][0][1]
    assert [row["d"] for row in found["sizes"]["BiSLS"]] == [10, 80]
    assert all((tmp_path / name).stat().st_size > 1000 for name in ("time.png", "time_sizes.png"))
    kept = (tmp_path / "time.jsonl").read_text()
    again = run("time", tmp_path, "--quick", "--tasks", "ridge", "image")
    assert again["results"] == found["results"]
    assert (tmp_path / "time.jsonl").read_text() == kept


def test_small_compares_iterations_in_turn(tmp_path):
    results = run("small", tmp_path, "--iterations", "3")["results"]
    plain, *ours = results
    assert results[plain]["ratio"] == 1.0
    assert len(ours) == 3
    same, *_ = ours
    assert results[same]["F"] == pytest.approx(results[plain]["F"], rel=1e-3)
