"""The same report as a Markdown page, for the documentation."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from pathlib import Path

from bisls._files import write_whole
from bisls.outcome import Outcome, Verdict
from bisls.report.page import PAPER, save_plots
from bisls.report.sections import DECIDED, OWN, Section, anchor, sections_of
from bisls.report.summary import BANDS, DECIDING, SCALES, SYMBOLS, Origin, count, described, slugs, words


def markdown_table(outcomes: Sequence[Outcome]) -> str:
    """The counts and a table of all statements."""
    names = slugs([outcome.name for outcome in outcomes])
    return "\n".join(_table([_section(*pair, "") for pair in zip(outcomes, names, strict=True)])) + "\n"


def write_markdown(
    outcomes: Sequence[Outcome],
    path: Path | str,
    images: str = "plots",
    title: str = "Reproduction",
    keep: bool = False,
    order: Sequence[str] = (),
) -> Path:
    """Write the page, and its plots as PNG files.

    Args:
        outcomes: What the figures came to, in the order of the page.
        path: The file.
        images: The folder of the plots, seen from the page.
        title: The page's heading.
        keep: Leave the other figures of a page that is there as they stand, and its heading: for a page that several runs fill.
        order: Names of figures in the order of such a page; others follow.

    Returns:
        The path of the page.

    Raises:
        ReportError: A page is to be kept that this did not write.
    """
    path = Path(path)
    names = slugs([outcome.name for outcome in outcomes])
    sections = [_section(outcome, name, images.rstrip("/")) for outcome, name in zip(outcomes, names, strict=True)]
    if keep and path.exists():
        before = path.read_text(encoding="utf-8")
        title = before.split("\n", 1)[0].removeprefix("# ")
        ranks = {name: rank for rank, name in enumerate(order)}
        sections += [one for one in sections_of(before) if one.name not in names]
        sections.sort(key=lambda one: ranks.get(one.name, len(ranks)))
    else:
        title = _escape(title)
    for outcome, name in zip(outcomes, names, strict=True):
        save_plots(outcome, name, path.parent / images, formats=("png",))
    origin = Origin.of(sections)
    lines = [f"# {title}", "", f"The experiments of *{PAPER}*, run again with bisls.", ""]
    scales = [f"{scale} ({SCALES[scale]})" if scale in SCALES else _escape(scale) for scale in origin.scales]
    lines += [f"- scale: {', '.join(scales) or 'nothing was run'}"]
    lines += [f"- newest record: {_escape(origin.newest)}"] if origin.newest else []
    lines += [f"- versions: {_escape(words(origin.versions))}"] if origin.versions else []
    lines += [f"- commit: {_escape(', '.join(origin.commits) or 'not recorded')}", ""]
    lines += [line for warning in origin.warnings for line in (f"**Note.** {_escape(warning)}", "")]
    lines += ["## Summary", "", *_table(sections), ""]
    lines += [line for section in sections for line in section.lines]
    lines += [DECIDED, ""]
    lines += [line for paragraph in (*DECIDING, BANDS) for line in (paragraph, "")]
    write_whole(path, "\n".join(lines).rstrip("\n") + "\n")
    return path


def _table(sections: Sequence[Section]) -> list[str]:
    verdicts = [verdict for section in sections for verdict in section.verdicts]
    return [
        f"The paper's claims: {count(verdicts, ours=False)}. Our default: {count(verdicts, ours=True)}.",
        "",
        "| figure | statement | the paper says | we see | verdict |",
        "|---|---|---|---|---|",
        *(row for section in sections for row in section.rows),
    ]


def _section(outcome: Outcome, name: str, images: str) -> Section:
    rows = tuple(
        f"| [{_escape(outcome.name)}](#fig-{name}) | {_statement(v)} | {_escape(v.told) or '–'} | {_escape(v.numbers)} | "
        f"{_badge(v)} |"
        for v in outcome.verdicts
    )
    lines = tuple(_lines(outcome, name, images))
    return Section(name, rows, lines, outcome.scale, outcome.facts, outcome.verdicts)


def _lines(outcome: Outcome, name: str, images: str) -> list[str]:
    lines = [anchor(name), "", f"## {_escape(outcome.name)}: {_escape(outcome.title)}", ""]
    for i, panel in enumerate(outcome.panels, 1):
        lines += [f"![{_escape(described(panel))}]({images}/{name}-{i}.png)", ""]
    for i, row in enumerate(outcome.pictures, 1):
        alt = _escape(f"{row.title}: {', '.join(row.labels)}")
        lines += [f"![{alt}]({images}/{name}-pictures-{i}.png)", ""]
    for table in outcome.tables:
        lines += [f"**{_escape(table.title)}.**", "", _row(table.columns), "|---" * len(table.columns) + "|"]
        lines += [*map(_row, table.rows), ""]
    if outcome.paper.strip():
        lines += ["**What the paper says.** " + _prose(outcome.paper), ""]
    lines += [
        "**What we saw.** " + (_prose(outcome.seen) or ("" if outcome.verdicts else "No statement was judged.")),
        "",
    ]
    for verdict in outcome.verdicts:
        numbers = f" ({_escape(verdict.numbers)})" if verdict.numbers else ""
        lines.append(f"- {_badge(verdict)}: {_statement(verdict)}{numbers}")
    lines += ["", "| setting | |", "|---|---|", f"| scale | {_escape(outcome.scale)} |"]
    lines += [f"| reading | {_escape(outcome.reading)} |"] if outcome.reading else []
    lines += [f"| {_escape(key)} | {_escape(value)} |" for key, value in outcome.settings.items()]
    lines += [f"| {_escape(str(key))} | {_escape(words(value))} |" for key, value in outcome.facts.items()]
    if outcome.command:
        lines += ["", "Run it again:", "", *(f"    {line}" for line in outcome.command.splitlines())]
    return [*lines, ""]


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(map(_escape, cells))} |"


def _badge(verdict: Verdict) -> str:
    return f"{SYMBOLS[verdict.judgement]} {verdict.judgement}"


def _statement(verdict: Verdict) -> str:
    return _escape(verdict.statement) + (f" {OWN}" if verdict.ours else "")


def _prose(text: str) -> str:
    return "\n\n".join(_escape(part) for part in text.split("\n\n") if part.strip())


def _escape(text: str) -> str:
    """Text that Markdown and HTML leave alone, on one line."""
    return re.sub(r"([\\`*_\[\]|~$])", r"\\\1", html.escape(" ".join(text.split()), quote=False))
