"""What `benchmarks/attack.py` attacks with: one module an attack, named in `NAMES`.

A module has

    ABOUT                               one sentence: what is attacked, and what must hold
    cases(seed) -> iterator of cases    seeded, endless or long; the n-th case of a seed is always the same one
    tried(case) -> str | None           None where all held; otherwise what broke, in words that a reader can use

and may have

    kind(case) -> str                   which row of the table a case is counted in (default: one row for all)
    promised(case) -> bool              False where nothing is promised: what breaks is counted, and is no failure

A case has a `repr` that tells what it is. Making one is quick and runs nothing; `tried` leaves the process as it found it, and
what it raises counts as broken.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

NAMES = ("probes", "resumes", "states", "junk")


@dataclass(frozen=True)
class Attack:
    """One module, with what it leaves out filled in."""

    name: str
    about: str
    cases: Callable[[int], Iterator[Any]]
    tried: Callable[[Any], str | None]
    kind: Callable[[Any], str]
    promised: Callable[[Any], bool]

    def case(self, seed: int, number: int) -> Any:
        """The case of that number, counted from 0."""
        for found in islice(self.cases(seed), number, None):
            return found
        raise ValueError(f"`--case {number}`: {self.name} has fewer cases with seed {seed}")

    def broken(self, case: Any) -> str | None:
        """What broke, or None: an exception that nobody foresaw is one of the ways to break."""
        try:
            return self.tried(case)
        except Exception as error:
            return f"{type(error).__name__}: {error}"


def load(name: str) -> Attack:
    """The attack of that name, one of `NAMES`."""
    module = importlib.import_module(f"{__name__}.{name}")
    return Attack(
        name,
        module.ABOUT,
        module.cases,
        module.tried,
        getattr(module, "kind", lambda case: ""),
        getattr(module, "promised", lambda case: True),
    )
