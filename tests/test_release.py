"""What goes out: one version, bounds that are tested, a wheel and an sdist that hold what they should and work when installed.

The environment here borrows torch from the one that runs the tests, so that it takes seconds; `make release`
does it from nothing.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

import pytest
import torch
from release import ROOT, attempt, built, check_sdist, check_wheel

import bisls

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_version_stands_in_one_place():
    assert "version" in PROJECT["dynamic"]
    text = bisls.__version__
    assert re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[1] == text
    places = [path for path in (ROOT / "src").rglob("*.py") if f'"{text}"' in path.read_text()]
    assert [path.name for path in places] == ["_version.py"]


def pins(name: str) -> dict[str, str]:
    lines = (ROOT / name).read_text().splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def test_the_oldest_versions_that_are_tested_are_those_that_are_promised():
    extras = PROJECT["optional-dependencies"]
    asked = [*PROJECT["dependencies"], *extras["cli"], *extras["tensorboard"], *extras["dask"], *extras["sklearn"]]
    asked += extras["tables"][1:]  # beside bisls[cli]
    oldest = pins("constraints-oldest.txt")
    for requirement in asked:
        name, bound = re.match(r"([\w-]+)>=([\d.]+)", requirement).groups()
        assert re.fullmatch(re.escape(bound) + r"(\.0)*", oldest[name]), requirement
    assert {"torch", "ruff", "mypy"} <= pins("constraints.txt").keys()


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dist")
    call = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(call, capture_output=True, text=True, check=False)  # the wheel is made from the sdist
    assert done.returncode == 0, done.stdout + done.stderr
    return built(folder)


@pytest.mark.slow
def test_the_wheel_and_the_sdist_hold_what_they_should(dist):
    wheel, sdist, version = dist
    assert version == bisls.__version__
    check_wheel(wheel, version)
    check_sdist(sdist, version)


@pytest.mark.slow
def test_the_installed_wheel_works(dist, tmp_path):
    wheel, _, version = dist
    venv.create(tmp_path / "env")
    python = tmp_path / "env" / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python), "install"]
    subprocess.run([*pip, "--quiet", "--no-deps", "--no-index", str(wheel)], check=True, cwd=tmp_path)
    (own,) = (tmp_path / "env").glob("lib/python*/site-packages")
    # a plain path: the .pth files of the other folder, an editable bisls among them, are not read
    (own / "borrowed.pth").write_text(str(Path(torch.__file__).parents[1]) + "\n")
    assert "all right" in attempt(python, version, "cli", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("missing", "arguments", "said"),
    [
        ("typer", ["--help"], "the bisls command needs typer: pip install 'bisls[cli]'"),
        ("matplotlib", ["demo", "--steps", "1"], "this command needs matplotlib: pip install 'bisls[cli]'"),
        ("jinja2", ["report", "."], "this command needs jinja2: pip install 'bisls[cli]'"),
    ],
)
def test_a_command_whose_extra_is_missing_says_which(missing, arguments, said, tmp_path):
    code = f"import sys; sys.modules[{missing!r}] = None; from bisls_cli import main; main()"
    call = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(call, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 1
    assert said in done.stderr
    assert "Traceback" not in done.stderr
