"""Attack the promises of the first page with random cases, and count what was tried, what held and what broke.

probes     random losses at trial points: no trace, and the same random numbers on both sides of a comparison
resumes    random runs that are cut anywhere and resumed in a fresh process's place: the run that was never cut
states     forged states and checkpoints: refused with nothing changed, or harmless
junk       junk arguments: refused in words that name the user's own call

    python benchmarks/attack.py                              four minutes, a minute an attack
    python benchmarks/attack.py --minutes 240                a night
    python benchmarks/attack.py --seed 7 --only probes       the same cases again, of one attack
    python benchmarks/attack.py --seed 7 --only probes --case 31
                                                             one case, with the traceback where it raises

Each attack has its share of the time, and stops earlier where it has no case left. What breaks is printed with the call that
repeats it. Ctrl-C ends the attack and prints the counts up to there. Results: out/attack.json, out/attack.md; the exit code
is 1 where something broke that is promised.
"""

from __future__ import annotations

import argparse
import json
import logging
import platform
import random
import subprocess
import sys
import time
import traceback
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from attacks import NAMES, Attack, load
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

import bisls

KEPT = 50  # failures that are written out, an attack; the rest is counted


@dataclass
class Count:
    """What came of the cases of one kind."""

    attack: str
    kind: str
    promised: bool
    tried: int = 0
    broken: int = 0

    @property
    def held(self) -> int:
        return self.tried - self.broken


@dataclass
class Outcome:
    """All counts of a run, and what broke."""

    seed: int
    counts: dict[tuple[str, str, bool], Count] = field(default_factory=dict)
    failures: list[dict[str, Any]] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def lost(self) -> bool:
        return any(own.promised and own.broken for own in self.counts.values())

    def count(self, attack: Attack, case: Any) -> Count:
        key = (attack.name, attack.kind(case), attack.promised(case))
        return self.counts.setdefault(key, Count(*key))

    def table(self) -> str:
        """The counts in Markdown, as docs/reliability.md has them."""
        lines = ["| attack | cases | tried | held | broken |", "|---|---|---|---|---|"]
        for name in NAMES:
            own = [row for row in self.counts.values() if row.attack == name]
            for row in sorted(own, key=lambda row: (not row.promised, row.kind)):
                kind = row.kind + ("" if row.promised else " (not promised)")
                lines.append(f"| {name} | {kind} | {row.tried:,} | {row.held:,} | {row.broken:,} |")
        return "\n".join(lines) + "\n"


def repeated(name: str, seed: int, number: int) -> str:
    return f"python benchmarks/attack.py --seed {seed} --only {name} --case {number}"


def run(attack: Attack, outcome: Outcome, seconds: float, console: Console) -> None:
    """Try one case after another until the time is over."""
    begun, written = time.monotonic(), 0
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[said]}"), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(f"{attack.name:<9}", total=seconds, said="")
        tried = broken = 0
        try:
            for number, case in enumerate(attack.cases(outcome.seed)):
                spent = time.monotonic() - begun
                if spent >= seconds:
                    break
                count = outcome.count(attack, case)
                text = attack.broken(case)
                count.tried, tried = count.tried + 1, tried + 1
                if text is not None:
                    count.broken, broken = count.broken + 1, broken + 1
                    if count.promised and written < KEPT:
                        written += 1
                        call = repeated(attack.name, outcome.seed, number)
                        outcome.failures.append(
                            {"attack": attack.name, "case": number, "what": repr(case), "broke": text, "repeat": call}
                        )
                        bar.console.print(f"[red]broken[/red] {escape(attack.name)}: {escape(text)}", soft_wrap=True)
                        bar.console.print(f"  {escape(repr(case))}\n  {call}", soft_wrap=True, highlight=False)
                bar.update(task, completed=spent, said=f"{tried:,} tried, {broken:,} broken")
        finally:
            outcome.seconds[attack.name] = time.monotonic() - begun


def one(attack: Attack, seed: int, number: int, console: Console) -> int:
    """A single case, with all that is known about it."""
    case = attack.case(seed, number)
    console.print(escape(repr(case)), soft_wrap=True)
    try:
        text = attack.tried(case)
    except Exception:
        text = traceback.format_exc()
    console.print("held" if text is None else f"[red]broken[/red]: {escape(text)}", soft_wrap=True)
    return 0 if text is None or not attack.promised(case) else 1


def facts(seed: int, minutes: float) -> dict[str, Any]:
    call = ["git", "describe", "--always", "--dirty"]
    commit = subprocess.run(call, capture_output=True, text=True, check=False, cwd=Path(__file__).parent).stdout.strip()
    return {
        "commit": commit,
        "bisls": bisls.__version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "seed": seed,
        "minutes": minutes,
    }


def written(outcome: Outcome, minutes: float, out: Path) -> str:
    """The results as files; returns the page."""
    own = facts(outcome.seed, minutes)
    results = {
        "counts": [{**vars(row), "held": row.held} for row in outcome.counts.values()],
        "failures": outcome.failures,
        "seconds": outcome.seconds,
    }
    out.mkdir(parents=True, exist_ok=True)
    (out / "attack.json").write_text(json.dumps({"facts": own, "results": results}, indent=1))
    origin = ", ".join(f"{name} {value}" for name, value in own.items() if name not in ("seed", "minutes"))
    page = outcome.table() + f"\nSeed {outcome.seed}, {minutes:g} minutes; {origin}.\n"
    for row in outcome.failures:
        page += f"\n- {row['attack']}: {row['broke']}\n\n  `{row['repeat']}`\n"
    (out / "attack.md").write_text(page)
    return page


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=4.0, help="for all attacks together (default: 4)")
    parser.add_argument("--seed", type=int, help="of the cases (default: a random one, which is printed)")
    parser.add_argument("--only", nargs="+", choices=NAMES, default=list(NAMES), help="some of the attacks")
    parser.add_argument("--case", type=int, help="try one case alone, with --seed and one name after --only")
    parser.add_argument("--out", type=Path, default=Path("out"), help="where the counts go (default: out)")
    asked = parser.parse_args()
    if not 0 < asked.minutes < float("inf"):
        parser.error(f"--minutes must be positive, got {asked.minutes:g}")
    if asked.case is not None and (asked.seed is None or len(asked.only) != 1 or asked.case < 0):
        parser.error("--case needs the seed and the attack it belongs to: --seed 7 --only probes --case 31")
    return asked


def main() -> int:
    asked = parsed()
    torch.set_num_threads(1)
    logging.getLogger("bisls").setLevel(logging.CRITICAL)  # what a solver says about hostile problems is no news
    warnings.simplefilter("ignore")
    console = Console()
    if asked.case is not None:
        return one(load(asked.only[0]), asked.seed, asked.case, console)
    outcome = Outcome(random.SystemRandom().randrange(10**6) if asked.seed is None else asked.seed)
    console.print(f"seed {outcome.seed}, {asked.minutes:g} minutes", highlight=False)
    attacks = [load(name) for name in asked.only]
    interrupted = False
    try:
        for attack in attacks:
            console.print(f"[bold]{attack.name}[/bold] {escape(attack.about)}", soft_wrap=True)
            run(attack, outcome, 60 * asked.minutes / len(attacks), console)
    except KeyboardInterrupt:
        interrupted = True
        console.print("interrupted: the counts up to here")
    page = written(outcome, asked.minutes, asked.out)
    console.print(page, markup=False, soft_wrap=True, highlight=False)
    return 130 if interrupted else int(outcome.lost)


if __name__ == "__main__":
    sys.exit(main())
