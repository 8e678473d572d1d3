"""One virtual environment a contestant, made here, and child processes that never outlive the command."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from side_by_side.contestants import Environment


class Refused(Exception):
    """An environment could not be made, or a run failed; the text is the reason."""


def made(name: str, environment: Environment, folder: Path) -> Path:
    """The interpreter of an environment, which is made unless it is there already with the same requirements.

    Raises:
        Refused: It cannot be made, or what was installed cannot be imported.
    """
    home = folder / name
    python = home / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    stamp = home / "made-of.txt"
    recipe = repr((environment, sys.version))
    if stamp.exists() and stamp.read_text(encoding="utf-8") == recipe and python.exists():
        return python
    if home.exists():
        shutil.rmtree(home)
    folder.mkdir(parents=True, exist_ok=True)
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    bare = [] if environment.installs else ["--without-pip"]
    try:
        ended([sys.executable, "-m", "venv", *bare, str(home)], limit=300)
        for requirements in environment.installs:
            ended([*pip, *requirements], limit=1800)
        ended([str(python), "-W", "ignore", "-c", f"import {environment.imports}"], limit=300)
    except Refused:
        shutil.rmtree(home, ignore_errors=True)
        raise
    stamp.write_text(recipe, encoding="utf-8")
    return python


def ended(call: list[str], limit: float, environment: Mapping[str, str] | None = None) -> str:
    """Run a command to its end and return its standard error.

    Raises:
        Refused: It failed, or took longer than `limit` seconds.
    """
    with _child(call, environment) as process:
        try:
            _, errors = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired as expired:
            raise Refused(f"took longer than {limit:.0f} s") from expired
    if process.returncode:
        raise Refused(reason(errors) or f"ended with code {process.returncode}")
    return errors


@contextmanager
def _child(call: list[str], environment: Mapping[str, str] | None) -> Iterator[subprocess.Popen[str]]:
    """A process in a group of its own, which is gone when the block ends, whatever ended it."""
    try:
        process = subprocess.Popen(
            call,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env=dict(plain_environment() if environment is None else environment),
            start_new_session=os.name == "posix",
        )
    except OSError as error:
        raise Refused(f"{call[0]}: {error.strerror}") from error
    try:
        yield process
    finally:
        if process.poll() is None:
            with suppress(ProcessLookupError):
                if os.name == "posix":
                    os.killpg(process.pid, signal.SIGKILL)
                else:
                    process.kill()
            process.wait()
        if process.stderr is not None:
            process.stderr.close()


def plain_environment() -> dict[str, str]:
    """What a child sees: nothing of the Python that runs this command."""
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}


def reason(errors: str) -> str:
    """The last line of an error text that says something; a traceback's or pip's own."""
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    lines = [line for line in lines if not line.lower().startswith(("warning", "[notice", "note:", "hint:"))]
    told = [line for line in lines if line.startswith("ERROR:")] or lines
    return told[-1].removeprefix("ERROR:").partition(" (Caused by")[0].strip()[:300] if told else ""


def digest(paths: list[Path], *more: object) -> str:
    """A short name for the contents of files and other facts, by which a finished run is known again."""
    total = hashlib.sha256(repr(more).encode())
    for path in sorted(paths):
        total.update(path.read_bytes())
    return total.hexdigest()[:12]
