"""One HTML page about a fitted table: it opens with a verdict, and needs no network, no script and no other file."""

from __future__ import annotations

import math
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from bisls._files import write_whole
from bisls.outcome import Panel, Series
from bisls.report.palette import colours
from bisls.report.plots import legend, panel_svg
from bisls.report.summary import described

SHOWN = 12  # groups in a plot; all of them are in the table
ROOM = 60  # letters that the names of groups may have below bars


def write_table_page(result: Mapping[str, Any], path: Path) -> Path:
    """Write the page of a result, as `bisls fit` leaves it in ``result.json``; the same result gives the same page."""
    write_whole(path, table_page(result))
    return path


def table_page(result: Mapping[str, Any]) -> str:
    """The page as text."""
    here = files("bisls.report")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["short"] = short
    template = environment.from_string(here.joinpath("table.html").read_text(encoding="utf-8"))
    return template.render(
        result=result,
        style=Markup(colours() + here.joinpath("style.css").read_text(encoding="utf-8")),
        rows=_compared(result),
        groups=_by_size(result),
        plots=[
            {
                "panel": panel,
                "svg": Markup(panel_svg(panel, f"p{i}", described(panel))),
                "legend": [(entry, Markup(entry.swatch)) for entry in legend(panel, f"p{i}-key")]
                if len(panel.series) > 1
                else [],
            }
            for i, panel in enumerate(_panels(result), 1)
        ],
    )


def short(value: Any) -> str:
    """A number as the page shows it."""
    if value is None or not math.isfinite(value):
        return "–"
    return f"{value:.4g}" if value else "0"


def _compared(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One row a method, on rows that neither its coefficients nor its penalties have seen; the best first."""
    nested = {width: (loss, error) for width, loss, error in result["nested"]}
    rows = [
        {
            "name": rival["name"],
            "loss": rival["loss"],
            "ours": False,
            "used": False,
            "note": "one penalty, scikit-learn",
        }
        for rival in result["rivals"]
    ]
    for width, (loss, error) in nested.items():
        name = "one penalty" if width == 0 else f"a penalty a group, width {width:g}"
        note = (
            ""
            if width == 0
            else f"difference from one penalty {loss - nested[0.0][0]:+.4g}, standard error {error:.2g}"
        )
        rows.append(
            {"name": f"bisls, {name}", "loss": loss, "ours": True, "used": width == result["spread"], "note": note}
        )
    if not nested:
        note = "not nested: the penalty was chosen by this number"
        rows.append({"name": "bisls, one penalty", "loss": result["cv_loss"], "ours": True, "used": True, "note": note})
    return sorted(rows, key=lambda row: float(row["loss"]))


def _by_size(result: Mapping[str, Any]) -> list[Any]:
    return sorted(result["groups"], key=lambda group: -group["size"])


def _panels(result: Mapping[str, Any]) -> list[Panel]:
    panels = []
    if result["nested"]:
        widths = tuple(f"{width:g}" for width, _, _ in result["nested"])
        losses = tuple(loss for _, loss, _ in result["nested"])
        flat = [
            Series(rival["name"], widths, (rival["loss"],) * len(widths), dashed=True) for rival in result["rivals"]
        ]
        ours = Series("bisls", widths, losses, ours=True, points=True)
        label = "width of the prior (0: one penalty)"
        panels.append(Panel("Nested loss against the width", label, f"nested {result['loss']}", (ours, *flat)))
    groups = _by_size(result)[:SHOWN]
    if len(groups) > 1:
        names = tuple(group["name"] for group in groups)
        label = ""
        if sum(map(len, names)) > ROOM:
            names, label = tuple(str(row) for row in range(1, len(names) + 1)), "row of the table below"
        penalties = tuple(group["penalty"] or math.nan for group in groups)
        sizes = tuple(group["size"] for group in groups)
        panels.append(
            Panel(
                "Penalty of each group",
                label,
                "penalty",
                (Series("penalty", names, penalties, ours=True),),
                yscale="log",
                bars=True,
            )
        )
        panels.append(
            Panel(
                "Coefficients by group",
                label,
                "root mean square, for one standard deviation",
                (Series("size", names, sizes, ours=True),),
                bars=True,
            )
        )
    return panels
