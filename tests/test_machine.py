"""The tests run on a machine that traps what its CPU promises: found out before torch is imported, and said."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from machine import CAP, PROBE, VARIABLE, settle

ROOT = Path(__file__).parent.parent
FENCE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
DIES = (sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGILL)")


def trapped(*command):
    """Run this where every bfloat16 product ends the process; nobody has set anything."""
    clean = {name: value for name, value in os.environ.items() if name != VARIABLE and "PYTEST" not in name}
    environment = {**clean, "PYTHONPATH": str(ROOT / "tests" / "trapped")}
    return subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, check=False, cwd=ROOT, env=environment
    )


def test_a_probe_that_dies_sets_the_variable_and_says_so():
    environment = {"PATH": os.environ["PATH"]}
    said = settle(environment, DIES)
    assert environment == {"PATH": os.environ["PATH"], VARIABLE: CAP}
    assert "SIGILL" in said
    assert f"{VARIABLE}={CAP}" in said


@pytest.mark.parametrize("end", [0, 1])
def test_a_probe_that_ends_by_itself_changes_nothing(end):
    environment = {"PATH": os.environ["PATH"]}
    assert settle(environment, (sys.executable, "-c", f"raise SystemExit({end})")) == ""
    assert environment == {"PATH": os.environ["PATH"]}


def test_what_the_user_has_set_is_respected(tmp_path):
    environment = {VARIABLE: "AVX2"}
    asked = tmp_path / "asked"
    assert settle(environment, (sys.executable, "-c", f"open({str(asked)!r}, 'w'); import os; os.abort()")) == ""
    assert environment == {VARIABLE: "AVX2"}
    assert not asked.exists()


def test_the_trap_kills_the_probe_and_the_variable_saves_it():
    assert trapped(*PROBE[1:]).returncode == -signal.SIGILL
    assert trapped("-c", f"import os; os.environ[{VARIABLE!r}] = {CAP!r}; {PROBE[-1]}").returncode == 0


def test_a_product_in_bfloat16():
    """Run here, and in the runs below under the trap."""
    ones = torch.ones(64, 64, dtype=torch.bfloat16)
    assert (ones @ ones).eq(64).all()


@pytest.mark.slow
@pytest.mark.parametrize("workers", [[], ["-n", "1"]], ids=["one process", "a worker"])
def test_a_run_under_the_trap_passes_and_its_header_says_why(workers):
    if workers:
        pytest.importorskip("xdist")
    done = trapped(
        "-m", "pytest", "tests/test_machine.py::test_a_product_in_bfloat16", "-p", "no:cacheprovider", *workers
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout
    assert f"{VARIABLE}={CAP}" in done.stdout


@pytest.mark.slow
def test_the_page_survives_where_a_user_runs_it_under_the_trap(tmp_path):
    page = (ROOT / "docs" / "own_problem.md").read_text()
    script = tmp_path / "page.py"
    script.write_text("\n".join(FENCE.findall(page)) + "\nprint('to the end')\n")
    done = trapped(str(script))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "to the end" in done.stdout
