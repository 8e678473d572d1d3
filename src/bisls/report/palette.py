"""The colours of plots, for light and dark pages."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Paint:
    """A colour with a name in the style sheet, and how it looks on a light and on a dark page."""

    name: str
    light: str
    dark: str


# Told apart with every kind of colour vision, and at least 3:1 against the page in both schemes; a test computes it.
OURS = Paint("ours", "#c2390b", "#ff8657")
REFERENCE = Paint("reference", "#59616b", "#aab3bd")
OTHERS = (
    Paint("series-1", "#0b5bb5", "#5a97fa"),
    Paint("series-2", "#8a8e47", "#e3be32"),
    Paint("series-3", "#008f71", "#45d5a1"),
    Paint("series-4", "#8c4187", "#cf97e0"),
    Paint("series-5", "#2f2f77", "#b9d8fa"),
    Paint("series-6", "#ce4866", "#f59cc4"),
    Paint("series-7", "#506f36", "#a5cc78"),
)
TEXT = "#1d2126"  # becomes currentColor
PAGE = "#fefefe"  # becomes the page's background
AXIS = Paint("axis", "#868e98", "#7d8792")
GRID = Paint("grid", "#e3e6ea", "#32383f")
PAINTS = (OURS, REFERENCE, *OTHERS, AXIS, GRID)
VARIABLES = {paint.light: f"var(--plot-{paint.name})" for paint in PAINTS} | {
    TEXT: "currentColor",
    PAGE: "var(--page)",
}


def colours() -> str:
    """The colours of the plots as a style sheet, for light and dark pages."""
    light, dark = (";".join(f"--plot-{p.name}:{getattr(p, kind)}" for p in PAINTS) for kind in ("light", "dark"))
    return f":root{{{light}}}\n@media screen and (prefers-color-scheme: dark){{:root{{{dark}}}}}\n"
