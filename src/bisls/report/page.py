"""One HTML page of all outcomes: it needs no network, no script and no other file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib.resources import files
from itertools import zip_longest
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from bisls._files import write_whole
from bisls._version import __version__
from bisls.outcome import Outcome, Pictures
from bisls.report.palette import colours
from bisls.report.plots import legend, panel_svg, picture_uris, save_panel, save_pictures
from bisls.report.summary import (
    BANDS,
    DECIDING,
    EMPTY,
    SCALES,
    SYMBOLS,
    Origin,
    all_verdicts,
    count,
    described,
    slugs,
    words,
)

TITLE = "Auto-tuned step sizes, reproduced"
PAPER = "BiSLS/SPS: Auto-tune Step Sizes for Stable Bi-level Optimization"


def write_report(
    outcomes: Sequence[Outcome], folder: Path | str, title: str = TITLE, expected: Sequence[str] = ()
) -> Path:
    """Write ``report.html``, ``plots/`` and, where they are missing, ``outcomes/`` into a folder.

    The same outcomes give the same page, byte for byte.

    Args:
        outcomes: What the figures came to, in the order of the page.
        folder: Where to; made if need be.
        title: The page's heading.
        expected: Names of figures that belong to a whole report; those without outcome are shown as not run.

    Returns:
        The path of the page.
    """
    folder = Path(folder)
    names = slugs([outcome.name for outcome in outcomes])
    for outcome, name in zip(outcomes, names, strict=True):
        save_plots(outcome, name, folder / "plots")
        record = folder / "outcomes" / f"{name}.json"
        if not record.exists():
            write_whole(record, outcome.to_json())
    path = folder / "report.html"
    write_whole(path, page(outcomes, title, expected))
    return path


def save_plots(outcome: Outcome, name: str, folder: Path, formats: Sequence[str] = ("svg", "png")) -> None:
    """The plots of a figure as ``name-1.png`` and so on, its pictures as ``name-pictures-1.png``."""
    for i, panel in enumerate(outcome.panels, 1):
        save_panel(panel, folder / f"{name}-{i}", formats)
    for i, pictures in enumerate(outcome.pictures, 1):
        save_pictures(pictures, folder / f"{name}-pictures-{i}.png")


def page(outcomes: Sequence[Outcome], title: str = TITLE, expected: Sequence[str] = ()) -> str:
    """The page as text."""
    here = files("bisls.report")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(here.joinpath("page.html").read_text(encoding="utf-8"))
    verdicts, origin = all_verdicts(outcomes), Origin.of(outcomes)
    there = {outcome.name for outcome in outcomes}
    missing = [name for name in dict.fromkeys(expected) if name not in there]
    anchors = slugs([*(outcome.name for outcome in outcomes), *missing])
    return template.render(
        title=title,
        paper=PAPER,
        version=__version__,
        style=Markup(colours() + here.joinpath("style.css").read_text(encoding="utf-8")),
        origin=origin,
        empty=[scale for scale in origin.scales if scale in EMPTY],
        scales=SCALES,
        symbols=SYMBOLS,
        claims=count(verdicts, ours=False),
        ours=count(verdicts, ours=True),
        figures=[_figure(outcome, anchor) for outcome, anchor in zip(outcomes, anchors, strict=False)],
        missing=[
            {"name": name, "anchor": f"fig-{anchor}"}
            for name, anchor in zip(missing, anchors[len(outcomes) :], strict=True)
        ],
        deciding=DECIDING,
        bands=BANDS,
    )


def _figure(outcome: Outcome, anchor: str) -> dict[str, Any]:
    """What the template needs of a figure."""
    return {
        "outcome": outcome,
        "anchor": f"fig-{anchor}",
        "empty": outcome.scale in EMPTY,
        "plots": [
            {
                "panel": panel,
                "svg": Markup(panel_svg(panel, f"{anchor}-p{i}", described(panel))),
                "legend": [(entry, Markup(entry.swatch)) for entry in legend(panel, f"{anchor}-p{i}-key")],
            }
            for i, panel in enumerate(outcome.panels, 1)
        ],
        "pictures": [{"title": row.title, "images": list(_pictures(row))} for row in outcome.pictures],
        "count": count(outcome.verdicts),
        "paper": _paragraphs(outcome.paper),
        "seen": _paragraphs(outcome.seen),
        "facts": {str(key): words(value) for key, value in outcome.facts.items()},
    }


def _pictures(row: Pictures) -> Iterator[dict[str, str]]:
    labels = row.labels[: len(row.images)]
    for i, (uri, label) in enumerate(zip_longest(picture_uris(row), labels, fillvalue=""), 1):
        yield {"uri": uri, "label": label, "alt": f"{row.title}: {label or i}"}


def _paragraphs(text: str) -> list[str]:
    return [part.strip() for part in text.split("\n\n") if part.strip()]
