"""What the page and the Markdown say alike: counts, where the numbers come from, names for links and files."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from bisls.outcome import Judgement, Outcome, Panel, Verdict

SYMBOLS = {Judgement.HOLDS: "✓", Judgement.FAILS: "✗", Judgement.UNDECIDED: "?"}
SCALES = {
    "smoke": "only shows that everything runs: so small that its verdicts mean nothing",
    "quick": "few seeds, small grids and short runs",
    "standard": 'three seeds, small grids, runs of a fifth to a third of the length at "paper"',
    "paper": "the paper's seeds and grids",
}
EMPTY = frozenset({"smoke"})  # the scales at which verdicts mean nothing: they are shown grey
PACKAGES = ("bisls", "torch", "numpy", "python", "scikit-learn")
_DECIDING = """
Every statement was put so that the records can contradict it, and a fixed rule decides; nobody looks at a plot. What is
compared is, as a rule, the loss at the end, averaged over seeds; a run that diverged counts as infinite.

“Holds” means that the records bear the statement out, “fails” that they contradict it, “undecided” that neither is
clear or that the runs for it are missing or say nothing. Where losses, errors or times are compared, noise is two standard
errors of the difference with two seeds or more, and 5 % of the larger value with one. “At or below” holds where the mean
is; “below” holds where it is by more than noise; both fail only where the mean is above by more than noise.

Statements on medians, counts, shares and fixed thresholds (“at least 8 of 10”, “at most half as many checks”, “from every
start”) have no rule for noise: they hold or fail as the number stands, so look at how near it is to its threshold. Rates have
a rule of their own, which their figure states.

Nothing holds of runs that got nowhere: a statement in favour of runs that all end above 90 % of where they began is
undecided. So is a comparison of Polyak steps with their ceilings where the Polyak step decides in less than 5 % of the
iterations, for then both are the same run. Times are of one machine.

The numbers beside a verdict are those that decided it. Statements marked “our default” are about this package and are
no claims of the paper: they are counted apart.
"""
BANDS = (
    "A curve is the mean of all seeds and the shaded band around it their range, where the settings say nothing else. A curve "
    "with a gap has values there that are not finite, or not positive on a logarithmic axis."
)
DECIDING = tuple(" ".join(paragraph.split()) for paragraph in _DECIDING.split("\n\n"))


@dataclass(frozen=True)
class Count:
    """How many statements hold, fail, are undecided."""

    holds: int
    fails: int
    undecided: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.holds + self.fails + self.undecided

    def __str__(self) -> str:
        if not self.total:
            return "no statements"
        hold, fail = ("holds" if self.holds == 1 else "hold"), ("fails" if self.fails == 1 else "fail")
        return f"{self.holds} {hold}, {self.fails} {fail}, {self.undecided} undecided"


def count(verdicts: Iterable[Verdict], ours: bool | None = None) -> Count:
    """Count the verdicts: the paper's claims (``ours=False``), those on our default (``True``), or all.

    Examples:
        >>> print(count([Verdict("a", Judgement.HOLDS, ""), Verdict("b", Judgement.FAILS, "", ours=True)], ours=False))
        1 holds, 0 fail, 0 undecided
    """
    wanted = [verdict.judgement for verdict in verdicts if ours is None or verdict.ours == ours]
    return Count(*(wanted.count(one) for one in (Judgement.HOLDS, Judgement.FAILS, Judgement.UNDECIDED)))


def all_verdicts(outcomes: Iterable[Outcome]) -> list[Verdict]:
    """The statements of all figures."""
    return [verdict for outcome in outcomes for verdict in outcome.verdicts]


def slugs(names: Sequence[str]) -> list[str]:
    """A name fit for links and files for each, no two alike.

    Examples:
        >>> slugs(["figure-1", "a/b", "a b", "../x"])
        ['figure-1', 'a-b', 'a-b-2', 'x']
    """
    made: list[str] = []
    for name in names:
        stem = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip(".-_") or "figure"
        slug, again = stem, 1
        while slug.lower() in {other.lower() for other in made}:  # some file systems don't tell A from a
            again += 1
            slug = f"{stem}-{again}"
        made.append(slug)
    return made


def words(value: Any) -> str:
    """A fact as text.

    Examples:
        >>> words({"torch": "2.9", "seeds": [0, 1]})
        'torch 2.9, seeds 0, 1'
        >>> words(list(range(60)))
        '0 to 59'
    """
    if (
        isinstance(value, list | range)
        and len(value) > 5
        and list(value) == list(range(value[0], value[0] + len(value)))
    ):
        return f"{value[0]} to {value[-1]}"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {words(entry)}" for key, entry in value.items())
    if isinstance(value, list | tuple | set | frozenset):
        return ", ".join(words(entry) for entry in value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def described(panel: Panel) -> str:
    """The panel in words."""
    if panel.alt:
        return panel.alt
    kind = "Bars" if panel.bars else "Curves"
    names = "; ".join(series.label for series in panel.series) or "none"
    return f"{panel.title}. {panel.ylabel} against {panel.xlabel}. {kind}: {names}."


class Sourced(Protocol):
    """What has a scale and facts."""

    @property
    def scale(self) -> str:
        """At which it was made."""

    @property
    def facts(self) -> Mapping[str, Any]:
        """Commits, versions."""


@dataclass(frozen=True)
class Origin:
    """Where the numbers of a report come from.

    Attributes:
        scales: Every scale among the figures.
        commits: Every commit of the runs.
        versions: Packages and their versions, several where they differ.
        newest: When the newest record was made; empty where nothing says so.
        dirty: Whether the source had changes that no commit has.
    """

    scales: tuple[str, ...]
    commits: tuple[str, ...]
    versions: Mapping[str, str]
    newest: str
    dirty: bool

    @classmethod
    def of(cls, outcomes: Sequence[Sourced]) -> Origin:
        """Gather it from the facts of outcomes, or of sections of a page."""
        facts = [outcome.facts for outcome in outcomes]
        commits = _several(facts, "commit", "commits")
        versions = {name: ", ".join(_several([_versions(fact) for fact in facts], name)) for name in PACKAGES}
        return cls(
            tuple(dict.fromkeys(outcome.scale for outcome in outcomes)),
            commits,
            {name: value for name, value in versions.items() if value},
            max(_several(facts, "newest", "date"), default=""),
            any("dirty" in commit for commit in commits) or any(fact.get("dirty") for fact in facts),
        )

    @property
    def warnings(self) -> list[str]:
        """What a reader should know before trusting the numbers."""
        found = []
        if len(self.commits) > 1:
            found.append(f"The runs come from {len(self.commits)} different commits; each figure names its own.")
        if self.dirty:
            found.append("Some runs were made from source with changes that are in no commit (“dirty”).")
        if len(self.scales) > 1:
            found.append(f"The figures were made at different scales: {', '.join(self.scales)}.")
        if "smoke" in self.scales:
            found.append(f"The scale “smoke” {SCALES['smoke']}.")
        mixed = [name for name, value in self.versions.items() if "," in value]
        if mixed:
            found.append(f"The runs used several versions of {', '.join(mixed)}.")
        return found


def _versions(facts: Mapping[str, Any]) -> Mapping[str, Any]:
    nested = facts.get("versions")
    return {**facts, **nested} if isinstance(nested, Mapping) else facts


def _several(facts: Sequence[Mapping[str, Any]], *keys: str) -> tuple[str, ...]:
    """The different values under any of the keys, each a value or a list of them."""
    values = [fact[key] for fact in facts for key in keys if fact.get(key)]
    flat = [one for value in values for one in (value if isinstance(value, list | tuple) else [value])]
    return tuple(dict.fromkeys(map(str, flat)))
