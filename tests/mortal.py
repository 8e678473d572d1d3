"""Runs whose worker dies in the middle of one of them; importable by the workers of a cluster."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from bisls.experiments.base import Config, RunRecord


@dataclass(frozen=True)
class Mortal(Config):
    """Notes that it began and that it ended; the first time, one of them is killed in between, with its worker."""

    kind: ClassVar[str] = "mortal"
    folder: str = ""
    dies: bool = False

    @property
    def work(self) -> float:
        return 0.1

    def note(self, what: str) -> int:
        path = Path(self.folder) / f"{what}.{self.seed}"
        with path.open("a") as file:
            file.write(f"{os.getpid()}\n")
        return len(path.read_text().split())

    def execute(self) -> RunRecord:
        if self.note("began") == 1 and self.dies:
            os.kill(os.getpid(), signal.SIGKILL)
        self.note("ended")
        return RunRecord(self.described(), {"f": (float(self.seed),)}, {})
