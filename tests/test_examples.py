"""Every example runs from its command line, says numbers and leaves a picture."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from math import isfinite
from pathlib import Path

import matplotlib.image
import pytest

ROOT = Path(__file__).parent.parent
STEPS = {"penalties": 2, "mislabelled": 4, "distil": 6, "representation": 4}


@pytest.mark.slow
@pytest.mark.parametrize("name", STEPS)
def test_the_example_runs_and_leaves_a_picture(name, tmp_path):
    command = [sys.executable, "-W", "error::RuntimeWarning", str(ROOT / "examples" / f"{name}.py")]
    command += ["--steps", str(STEPS[name]), "--out", str(tmp_path / "new")]
    source = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": source, "MPLBACKEND": "agg", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    numbers = re.findall(r"\d+\.\d+|\bnan\b|\binf\b", done.stdout)
    assert len(numbers) >= 4, done.stdout
    assert all(isfinite(float(number)) for number in numbers), done.stdout
    height, width = matplotlib.image.imread(tmp_path / "new" / f"{name}.png").shape[:2]
    assert width >= 900
    assert height >= (370 if name == "distil" else 400)  # a short run keeps fewer rows of pictures
    assert (tmp_path / "new" / f"{name}.png").stat().st_size > 20_000


@pytest.mark.parametrize("name", STEPS)
def test_nobody_sets_a_learning_rate(name):
    """What the examples are there to show."""
    code = (ROOT / "examples" / f"{name}.py").read_text()
    assert "bisls.BiSLS(problem)" in code
    assert not re.search(r"\blr=|\balpha=|\bbeta=", code)


@pytest.mark.parametrize("name", STEPS)
def test_the_documentation_has_the_example(name):
    page = (ROOT / "docs" / "examples.md").read_text()
    assert f"python examples/{name}.py" in page
    assert f"plots/example-{name}.png" in page
    assert (ROOT / "docs" / "plots" / f"example-{name}.png").stat().st_size < 160_000
