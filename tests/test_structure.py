"""The shape of the package: imports point one way, only the evaluators call autograd, linters pass, the version is one."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import bisls

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "bisls"

# a module may import from those before it (and from its own folder)
ORDER = [
    "_version",
    "_check",
    "_files",
    "states",
    "randomness",
    "interrupts",
    "status",
    "ranks",
    "agreement",
    "replicas",
    "progress",
    "overlap",
    "vector",
    "naming",
    "surroundings",
    "generators",
    "buffered",
    "still",
    "bounds",
    "problem",
    "operators",
    "batches",
    "arrays",
    "signs",
    "evaluate",
    "points",
    "oracle",
    "line",
    "record",
    "outcome",
    "linear",
    "derivatives",
    "directions",
    "steps",
    "pace",
    "best",
    "walk",
    "lower",
    "hypergrad",
    "check",
    "folds",
    "response",
    "parts",
    "trend",
    "sampling",
    "upper",
    "smooth",
    "paced",
    "views",
    "solver_state",
    "solver",
    "methods",
    "feed",
    "draws",
    "places",
    "standstill",
    "checkpoint_file",
    "hooks",
    "checkpoint",
    "saving",
    "logs",
    "callbacks",
    "fit",
    "sensitivity_report",
    "sensitivity",
    "optim",
    "data",
    "tasks",
    "_names",
    "sklearn",
    "demo",
    "experiments",
    "report",
    "tables",
    "console",
    "__main__",
]


def modules():
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if name != "__init__":
            yield path, name


def imported(path: Path) -> set[str]:
    """The rooms that a module imports from."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        sources = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        sources += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        found |= {source.split(".")[1] for source in sources if source.startswith("bisls.")}
    return found


def test_imports_point_one_way():
    for path, name in modules():
        assert name in ORDER, f"{name} has no place in the order of imports"
        for source in imported(path) - {name}:
            assert ORDER.index(source) < ORDER.index(name), f"{path.name} imports {source}"


def test_the_map_has_every_room_in_the_order_of_imports():
    rows = re.findall(
        r"^\| (`.*?) \|", (ROOT / "docs" / "architecture.md").read_text().split("## One outer")[0], re.MULTILINE
    )
    rooms = [name.removesuffix("/") for row in rows for name in re.findall(r"`(.*?)`", row)]
    assert sorted(rooms) == sorted(set(ORDER) - {"__main__"})
    for path, name in modules():
        for source in imported(path):
            if name in rooms and source != name and source in rooms:
                assert rooms.index(source) < rooms.index(name), f"{path.name} imports {source}"


def test_no_file_is_long():
    """A file that passes 400 lines is cut."""
    for path in PACKAGE.parent.rglob("*.py"):
        assert len(path.read_text().splitlines()) <= 400, path


def test_only_the_evaluators_call_autograd():
    for path, name in modules():
        if name in ("evaluate", "demo"):  # the demonstration trains torch's SGD the usual way
            continue
        attributes = {node.attr for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)}
        assert not attributes & {"autograd", "backward"}, path


def test_public_names_are_reexported_without_logic():
    tree = ast.parse((PACKAGE / "_names.py").read_text())
    assert all(isinstance(node, ast.ImportFrom | ast.Expr) for node in tree.body)


ASKED = """
import sys, bisls
assert "torch" not in sys.modules, "the package"
from bisls.sklearn import GroupRidgeCV
GroupRidgeCV().fit([[1.0, 2], [2, 1], [3, 5], [1, 1], [4, 4], [0, 1]], [1, 2, 3, 4, 5, 6.0])
assert "torch" not in sys.modules, "an estimator"
from bisls.fit import FitError
import bisls.sensitivity
from bisls import optim, BiSLS
assert callable(bisls.fit) and callable(bisls.sensitivity)
assert bisls.fit.__module__ == "bisls.fit" and bisls.optim is optim and bisls.BiSLS is BiSLS
assert bisls.steps.Armijo is bisls.Armijo  # rooms that came with the names, as before
assert {"BiSLS", "fit", "__version__"} <= set(dir(bisls))
from bisls import *
assert fit is bisls.fit and Tangent is bisls.Tangent
for name in ("nonsense", "_nonsense", "__wrapped__"):
    assert not hasattr(bisls, name), name
"""


def test_names_come_when_they_are_asked_for_and_torch_with_them():
    done = subprocess.run([sys.executable, "-c", ASKED], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_one_version():
    assert version("bisls") == bisls.__version__


def test_the_linters_pass():
    for command in (["ruff", "check", "."], ["ruff", "format", "--check", "."], ["mypy"]):
        done = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
