"""Check a built wheel and sdist: what is in them, and that each works in an environment with nothing else in it.

    python -m build && python tests/release.py dist        (`make release` does both)

The wheel is installed alone and tried, then with its extra and tried again; the sdist then takes the wheel's place. torch is the
one of constraints.txt.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
LARGEST = 1_200_000  # bytes of either file: the package is code and prose
TOP = {
    "src", "tests", "docs", "benchmarks", "examples", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "Makefile",
    "mkdocs.yml", "constraints.txt", "constraints-oldest.txt", "pyproject.toml", "PKG-INFO", ".gitignore",
}  # fmt: skip


def files_of(folder: str) -> set[str]:
    """All files under a folder of the checkout, relative to the checkout."""
    paths = (path for path in (ROOT / folder).rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(ROOT).as_posix() for path in paths}


def check_wheel(path: Path, version: str) -> None:
    """The package, all of it, and its metadata; nothing else."""
    names = set(zipfile.ZipFile(path).namelist())
    code = {name.removeprefix("src/") for name in files_of("src")}
    about = {f"bisls-{version}.dist-info/{name}" for name in ("METADATA", "WHEEL", "RECORD", "entry_points.txt")}
    expected = code | about | {f"bisls-{version}.dist-info/licenses/LICENSE"}
    assert names == expected, f"{path.name}: {sorted(names ^ expected)}"
    assert path.stat().st_size < LARGEST, f"{path.name} has {path.stat().st_size} bytes"


def check_sdist(path: Path, version: str) -> None:
    """What is needed to build, to test and to read; no pictures."""
    with tarfile.open(path) as archive:
        names = {name.removeprefix(f"bisls-{version}/") for name in archive.getnames()}
    assert {name.split("/")[0] for name in names} == TOP, sorted({name.split("/")[0] for name in names} ^ TOP)
    assert files_of("src") | files_of("tests") | files_of("benchmarks") | files_of("examples") <= names
    assert not {name for name in names if name.endswith((".png", ".pyc", ".pt", ".jsonl"))}
    assert path.stat().st_size < LARGEST, f"{path.name} has {path.stat().st_size} bytes"


def built(folder: Path) -> tuple[Path, Path, str]:
    """The wheel, the sdist and their version."""
    (wheel,), (sdist,) = folder.glob("bisls-*.whl"), folder.glob("bisls-*.tar.gz")
    version = sdist.name.removeprefix("bisls-").removesuffix(".tar.gz")
    assert wheel.name == f"bisls-{version}-py3-none-any.whl"
    return wheel.resolve(), sdist.resolve(), version


def attempt(python: Path, version: str, what: str, folder: Path) -> str:
    """`installed.py` with this interpreter, isolated and from this folder."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    call = [str(python), "-I", str(ROOT / "tests" / "installed.py"), version, what]
    done = subprocess.run(call, capture_output=True, text=True, check=False, cwd=folder, env=clean)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


def main() -> None:
    wheel, sdist, version = built(Path(sys.argv[1]))
    check_wheel(wheel, version)
    check_sdist(sdist, version)
    print(f"{wheel.name}: {wheel.stat().st_size:,} bytes; {sdist.name}: {sdist.stat().st_size:,} bytes", flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        venv.create(folder / "env", with_pip=True)
        python = folder / "env" / "bin" / "python"
        pip = [python, "-m", "pip", "--disable-pip-version-check", "--quiet"]
        install = [*pip, "install", "--constraint", ROOT / "constraints.txt"]
        subprocess.run([*install, wheel], check=True, cwd=folder)
        print("wheel:", attempt(python, version, "bare", folder), flush=True)
        subprocess.run([*install, f"{wheel}[cli]"], check=True, cwd=folder)
        print("wheel:", attempt(python, version, "cli", folder), flush=True)
        subprocess.run([*pip, "uninstall", "--yes", "bisls"], check=True, cwd=folder)
        subprocess.run([*install, f"{sdist}[cli]"], check=True, cwd=folder)
        print("sdist:", attempt(python, version, "cli", folder), flush=True)
        subprocess.run([*pip, "check"], check=True, cwd=folder)


if __name__ == "__main__":
    main()
