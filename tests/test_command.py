"""The command and the benchmark, run as a user runs them, at a small size."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import bisls

ROOT = Path(__file__).parent.parent


def run(*command, **more):
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False, cwd=ROOT, **more)


def bisls_command(*arguments):
    return run("-c", "from bisls_cli import main; main()", *arguments)


@pytest.mark.slow
def test_demo_prints_a_table_and_saves_a_plot(tmp_path):
    done = bisls_command("demo", "--steps", "12", "--out", str(tmp_path / "new" / "folder"))
    assert done.returncode == 0, done.stderr
    assert "bisls BiSLS" in done.stdout
    assert "best of the grid" in done.stdout
    picture = tmp_path / "new" / "folder" / "demo.png"
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert picture.stat().st_size > 20_000


def test_mistakes_are_answered_without_a_traceback(tmp_path):
    (tmp_path / "file").write_text("")
    for arguments, message in [
        (["demo", "--steps", "0"], "--steps"),
        (["demo", "--steps", "1", "--out", str(tmp_path / "file")], "--out"),
        (["demo", "--steps", "1", "--out", str(tmp_path / "file" / "below")], "cannot write to --out"),
        (["demonstrate"], "No such command"),
    ]:
        done = bisls_command(*arguments)
        assert done.returncode != 0
        assert message in done.stderr
        assert "Traceback" not in done.stderr


def test_help_and_version():
    assert bisls_command("--version").stdout.strip() == f"bisls {bisls.__version__}"
    assert "Example" in bisls_command("demo", "--help").stdout


@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["reproduce", "--help"]], ids=" ".join)
def test_questions_about_the_command_are_answered_without_torch(arguments):
    """By the script that an installation makes."""
    code = "; ".join(
        [
            "import atexit, sys",
            "from importlib.metadata import entry_points",
            "(one,) = entry_points(group='console_scripts', name='bisls')",
            "atexit.register(lambda: print('there:', sorted({'torch', 'numpy', 'bisls'} & set(sys.modules))))",
            "one.load()()",
        ]
    )
    done = run("-c", code, *arguments)
    assert done.returncode == 0, done.stderr
    *answer, last = done.stdout.splitlines()
    assert any(answer)
    assert last == "there: []"


@pytest.mark.slow
def test_the_benchmark_runs_resumes_and_records_where_its_numbers_come_from(tmp_path):
    command = ["benchmarks/optimisers.py", "--iters", "20", "--seeds", "1", "--data", "breast_cancer", "--jobs", "1"]
    command += ["--only", "Auto", "bisls SPSB", "torch SGD,", "--out", str(tmp_path)]
    first = run(*command)
    assert first.returncode == 0, first.stderr
    log = (tmp_path / "optimisers.jsonl").read_text()
    summary = json.loads((tmp_path / "optimisers.json").read_text())
    assert {"commit", "torch", "bisls"} <= summary["origin"].keys()
    gaps = summary["gaps"]["breast_cancer"]
    assert 0 < gaps["bisls Auto"]["default"] < 0.3
    assert 1.0 < summary["forwards"]["breast_cancer"]["bisls Auto"] < 4.0
    assert summary["forwards"]["breast_cancer"]["bisls SPSB"] == 1.0
    assert run(*command).returncode == 0
    assert (tmp_path / "optimisers.jsonl").read_text() == log  # nothing was run again
    missing = run("benchmarks/optimisers.py", "--data", "w8a", env={"PATH": "/usr/bin"})
    assert missing.returncode == 2
    assert "BISLS_DATA" in missing.stderr
