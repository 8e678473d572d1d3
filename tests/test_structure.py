"""The shape of the package: imports point one way, only the oracle calls autograd, linters pass, the version is one."""

from __future__ import annotations

import ast
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
    "vector",
    "still",
    "bounds",
    "problem",
    "tape",
    "player",
    "oracle",
    "line",
    "record",
    "outcome",
    "linear",
    "hypergrad",
    "directions",
    "steps",
    "check",
    "response",
    "solver",
    "methods",
    "feed",
    "checkpoint",
    "callbacks",
    "fit",
    "sensitivity",
    "optim",
    "data",
    "tasks",
    "demo",
    "experiments",
    "report",
    "console",
    "cli",
    "__main__",
]


def modules():
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if name != "__init__":
            yield path, name


def test_imports_point_one_way():
    for path, name in modules():
        assert name in ORDER, f"{name} has no place in the order of imports"
        for node in ast.walk(ast.parse(path.read_text())):
            sources = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            sources += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for source in sources:
                parts = source.split(".")
                if parts[0] == "bisls" and len(parts) > 1 and parts[1] != name:
                    assert ORDER.index(parts[1]) < ORDER.index(name), f"{path.name} imports {source}"


def test_only_the_oracle_calls_autograd():
    for path, name in modules():
        if name in ("oracle", "demo"):  # the demonstration trains torch's SGD the usual way
            continue
        attributes = {node.attr for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)}
        assert not attributes & {"autograd", "backward"}, path


def test_public_names_are_reexported_without_logic():
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    assert all(isinstance(node, ast.ImportFrom | ast.Expr) for node in tree.body)


def test_one_version():
    assert version("bisls") == bisls.__version__


def test_the_linters_pass():
    for command in (["ruff", "check", "."], ["ruff", "format", "--check", "."], ["mypy"]):
        done = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
