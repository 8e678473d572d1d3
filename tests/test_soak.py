"""Nothing is left behind by an iteration: what is alive does not grow, but for the records that a history keeps.

`benchmarks/soak.py` counts; here it runs a few hundred iterations of each kind. Its full length, 20,000, also sees a number
that is kept by each iteration and what C++ holds; here objects are told, exactly, and blocks of memory once they are two
an iteration: Python's own caches still shrink by about one while they settle.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch

import bisls

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
spec = importlib.util.spec_from_file_location("soak", ROOT / "benchmarks" / "soak.py")
soak = importlib.util.module_from_spec(spec)
spec.loader.exec_module(soak)

ITERATIONS, WARM = 250, 100


@pytest.mark.parametrize("kind", soak.KINDS)
def test_an_iteration_leaves_nothing_behind(kind):
    found = soak.soak(kind, ITERATIONS, samples=2, warm=WARM)
    # less than one object in ten iterations: a leak is one in each
    assert found["growth"]["objects"] < 0.1
    assert found["growth"]["blocks"] < 2.0
    assert found["records"] == (ITERATIONS if kind == "fit" else 0)
    # a record is sixteen numbers and its counts; a history of 20,000 of them must fit anywhere
    assert found["kept"] < 4000


LEAKS = {
    "a record": lambda kept, solver, record: kept.append(record),
    "a graph": lambda kept, solver, record: kept.append(solver.problem.x.tensors[0].sum()),
    "numbers": lambda kept, solver, record: kept.extend(float(record.k + i) for i in range(6)),
}


@pytest.mark.parametrize("what", LEAKS)
def test_a_leak_would_be_seen(what, monkeypatch):
    kept, step = [], bisls.Solver.step

    def leaking(self, *batches):
        record = step(self, *batches)
        LEAKS[what](kept, self, record)
        return record

    monkeypatch.setattr(bisls.Solver, "step", leaking)
    found = soak.soak("step", ITERATIONS, samples=2, warm=WARM)
    assert found["growth"]["objects"] > 0.9 or found["growth"]["blocks"] > 2.0
    assert not found["flat"]


def test_the_command_writes_its_counts(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["soak.py", "--quick", "--kinds", "auto", "--out", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        soak.main()
    assert ended.value.code == 0
    found = json.loads((tmp_path / "soak.json").read_text())
    assert found["facts"]["torch"] == torch.__version__
    assert [own["kind"] for own in found["results"]] == ["auto"]
    assert len(found["results"][0]["samples"]) >= 10
    assert "| auto | 300 |" in (tmp_path / "soak.md").read_text()
    assert "| auto |" in capsys.readouterr().out
