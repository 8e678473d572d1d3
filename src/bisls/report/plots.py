"""Panels as figures: SVG for the page, whose colours follow the reader's light or dark scheme, and files."""

from __future__ import annotations

import base64
import io
import math
import re
import textwrap
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.image import imsave
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.ticker import LogFormatterMathtext, MaxNLocator

from bisls._files import write_whole
from bisls.outcome import Panel, Pictures
from bisls.report.inline import inline
from bisls.report.palette import AXIS, GRID, OTHERS, OURS, PAGE, REFERENCE, TEXT, Paint
from bisls.report.values import KEPT, LONG, Array, Values, names_of, numeric, thin

DASHES: tuple[tuple[float, ...], ...] = ((), (6, 2), (1.5, 1.5), (6, 2, 1.5, 2))
MARKS = ("o", "s", "^", "D", "v", "P", "X")
FEW = 6  # places of points, up to which each has its tick
HATCHES = ("///", "...", "xxx", "\\\\\\", "---", "ooo", "+++")

_BARE: Any = {"Software": None}  # nothing in a file but the picture

_RC: Any = {
    "svg.hashsalt": "bisls",
    "text.parse_math": False,
    "text.usetex": False,
    "font.family": ["DejaVu Sans"],
    "font.size": 9.5,
    "axes.edgecolor": AXIS.light,
    "axes.labelcolor": TEXT,
    "axes.titlecolor": TEXT,
    "axes.titlesize": 10,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.unicode_minus": True,
    "grid.color": GRID.light,
    "grid.linewidth": 0.7,
    "xtick.color": AXIS.light,
    "ytick.color": AXIS.light,
    "xtick.labelcolor": TEXT,
    "ytick.labelcolor": TEXT,
    "text.color": TEXT,
    "lines.scale_dashes": False,
    "hatch.linewidth": 0.8,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "path.simplify": True,
    "path.simplify_threshold": 0.2,
}


@dataclass(frozen=True)
class Look:
    """How a series is drawn."""

    paint: Paint
    dash: tuple[float, ...]
    mark: str | None
    hatch: str | None
    width: float
    order: float

    @property
    def style(self) -> Any:
        """The dash pattern as matplotlib wants it."""
        return (0, self.dash) if self.dash else "-"


@dataclass(frozen=True)
class Entry:
    """A line of a legend: the series' name and a small SVG that looks like it."""

    label: str
    swatch: str
    ours: bool


def looks(panel: Panel) -> tuple[Look, ...]:
    """A look for each series: no two share mark and dash before the 29th, ours is always the same colour and thick."""
    made = []
    ours = references = others = 0
    for series in panel.series:
        if series.dashed:
            dash = ((4.0, 3.0), (1.0, 2.0), (8.0, 3.0), (5.0, 2.0, 1.0, 2.0))[references % 4]
            made.append(Look(OURS if series.ours else REFERENCE, dash, None, "", 1.0, 2.2))
            references += 1
        elif series.ours:
            made.append(Look(OURS, DASHES[ours % 4], (None, *MARKS)[ours % 8], None, 2.8, 3.0))
            ours += 1
        else:
            i = others
            made.append(Look(OTHERS[i % 7], DASHES[i % 4], MARKS[i % 7], HATCHES[i % 7], 1.3, 2.5 - 0.01 * i))
            others += 1
    return tuple(made)


def panel_svg(panel: Panel, prefix: str, alt: str) -> str:
    """A panel as SVG to stand in an HTML page; its legend is `legend`, its title is the page's.

    Args:
        panel: The panel.
        prefix: Begins every id inside, so that they are unique in the page.
        alt: The panel in words.
    """
    with _drawing(fonttype="none"):
        figure = Figure(figsize=(4.6, 4.2) if panel.equal else (4.6, 3.1), layout="constrained")
        _draw(figure.add_subplot(), panel, Values.of(panel))
        return inline(_svg(figure, transparent=True), prefix, alt)


def legend(panel: Panel, prefix: str) -> tuple[Entry, ...]:
    """The legend of a panel; a curve without any value to draw is named as such."""
    entries = []
    values = Values.of(panel)
    with _drawing(fonttype="none"):
        for i, (series, look, name) in enumerate(zip(panel.series, looks(panel), names_of(panel, values), strict=True)):
            figure = Figure(figsize=(0.42, 0.16))
            figure.add_artist(_sample(look, panel.bars, values.single(i), figure))
            swatch = inline(_svg(figure, transparent=True), f"{prefix}-{i}", "")
            entries.append(Entry(name, swatch, series.ours))
    return tuple(entries)


def save_panel(panel: Panel, stem: Path, formats: Sequence[str] = ("svg", "png")) -> None:
    """A panel with title and legend as files beside each other, on white."""
    with _drawing(fonttype="path"):
        rows = math.ceil(len(panel.series) / 2)
        figure = Figure(figsize=(6.4, (5.4 if panel.equal else 4.2) + 0.19 * rows), layout="constrained")
        axes = figure.add_subplot()
        values = Values.of(panel)
        _draw(axes, panel, values)
        axes.set_title(textwrap.fill(panel.title, 70))
        samples = [_sample(look, panel.bars, values.single(i)) for i, look in enumerate(looks(panel))]
        names = [textwrap.shorten(name, 60, placeholder="…") for name in names_of(panel, values)]
        if samples:
            figure.legend(samples, names, loc="outside lower center", ncols=2, handlelength=3)
        figure.get_layout_engine().execute(figure)  # type: ignore[union-attr]
        figure.set_layout_engine("none")  # once is enough for all formats
        for kind in formats:
            write_whole(stem.with_name(f"{stem.name}.{kind}"), _svg(figure) if kind == "svg" else _png(figure))


def picture_uris(pictures: Pictures) -> tuple[str, ...]:
    """Each picture as a PNG inside a link."""
    made = []
    for image in pictures.images:
        buffer = io.BytesIO()
        imsave(buffer, _grey(image), cmap="gray", vmin=0.0, vmax=1.0, format="png", metadata=_BARE)
        made.append("data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode())
    return tuple(made)


def save_pictures(pictures: Pictures, path: Path) -> None:
    """All pictures in one file, five a row."""
    with _drawing(fonttype="path"):
        rows = max(1, math.ceil(len(pictures.images) / 5))
        figure = Figure(figsize=(6.4, 1.5 * rows + 0.3), layout="constrained")
        figure.suptitle(textwrap.fill(pictures.title, 70), fontsize=10)
        for i, image in enumerate(pictures.images):
            axes = figure.add_subplot(rows, 5, i + 1)
            axes.imshow(_grey(image), cmap="gray", vmin=0.0, vmax=1.0, interpolation="nearest")
            axes.set_axis_off()
            axes.set_title(pictures.labels[i] if i < len(pictures.labels) else "", fontsize=8)
        write_whole(path, _png(figure))


@contextmanager
def _drawing(fonttype: str) -> Iterator[None]:
    with mpl.rc_context(), warnings.catch_warnings():
        mpl.rcdefaults()
        mpl.rcParams.update({**_RC, "svg.fonttype": fonttype})
        warnings.filterwarnings("ignore", message=r"Glyph .* missing")  # the browser's fonts may have it
        yield


def _draw(axes: Axes, panel: Panel, values: Values) -> None:
    axes.set_xlabel(textwrap.fill(panel.xlabel, 50))
    axes.set_ylabel(textwrap.fill(panel.ylabel, 32))
    (_bars if panel.bars else _curves)(axes, panel, values)
    for axis, scale in ((axes.yaxis, panel.yscale), (axes.xaxis, "linear" if panel.bars else panel.xscale)):
        if scale == "log" and axis.get_scale() == "log":
            axis.set_major_formatter(_Powers())
            axis.set_minor_formatter(_Powers(labelOnlyBase=False, minor_thresholds=(1.2, 0.5)))
            axis.set_tick_params(which="minor", labelsize=8)
    if panel.ylim is not None and np.isfinite(panel.ylim).all():
        low, high = panel.ylim
        if low < high and (panel.yscale != "log" or low > 0):
            axes.set_ylim(low, high)
    if panel.equal and not panel.bars:
        axes.set_aspect("equal", adjustable="datalim" if panel.ylim is None else "box")
    if not values.any:
        text = "no value that can be drawn" if panel.series else "no data"
        axes.text(0.5, 0.5, text, ha="center", va="center", transform=axes.transAxes)
        axes.set_xticks([])
        axes.set_yticks([])


NARROW = 30.0  # an axis of so small a ratio is labelled with numbers, not with powers


class _Powers(LogFormatterMathtext):
    """Powers of ten in plain characters: no TeX, so that every label is plain text."""

    def __call__(self, x: float, pos: int | None = None) -> str:
        text = super().__call__(x, pos)
        low, high = sorted(self.axis.get_view_interval()) if self.axis else (0.0, 0.0)
        between = x > 0 and np.log10(x) % 1 > 1e-9  # labelled on an axis of a decade or less
        if text and x > 0 and (between or (low >= 1e-3 and high <= 1e4 and high < NARROW * low)):
            return f"{x:.3g}"  # the number itself
        text = re.sub(r"\^\{([^}]*)\}", lambda found: found[1].translate(_SUPERSCRIPT), text)
        return re.sub(r"\$|\\mathdefault|[{}]", "", text.replace(r"\times", "×").replace(r"\,", ""))


_SUPERSCRIPT = str.maketrans("0123456789-−.", "⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁻·")


def _curves(axes: Axes, panel: Panel, values: Values) -> None:
    if values.any:  # a log scale with nothing on it can't place its ticks
        if not values.names:
            axes.set_xscale(_scale(panel.xscale), **({"nonpositive": "mask"} if panel.xscale == "log" else {}))
        axes.set_yscale(_scale(panel.yscale), **({"nonpositive": "mask"} if panel.yscale == "log" else {}))
    marked = 0
    for i, (series, look, (x, y)) in enumerate(zip(panel.series, looks(panel), values.points, strict=True)):
        if not np.isfinite(y).any():
            continue
        kept = np.linspace(0, len(y) - 1, KEPT).astype(int) if panel.equal and len(y) > LONG else thin(y)
        if series.low is not None and series.high is not None:
            low, high = (numeric(edge, len(y), False) for edge in (series.low, series.high))
            if panel.yscale == "log":  # a band that reaches down to 0 ends well below its curve
                low = np.where(low > 0, low, np.nanmin(y) * 1e-1)
                high = np.where(high > 0, high, np.nan)
            axes.fill_between(
                x[kept], low[kept], high[kept], where=np.isfinite(low + high)[kept].tolist(),
                color=look.paint.light, alpha=0.16, linewidth=0, zorder=look.order - 1,
            )  # fmt: skip
        x, y = x[kept], y[kept]
        (line,) = axes.plot(x, y, color=look.paint.light, linestyle=look.style, linewidth=look.width, zorder=look.order)
        line.set_solid_capstyle("round")
        good = np.isfinite(y)
        finite = np.flatnonzero(good)
        alone = np.flatnonzero(
            good & ~np.append(False, good[:-1]) & ~np.append(good[1:], False)
        )  # lines don't show them
        marks = finite if series.points else alone
        if look.mark and not series.points:
            marks = np.union1d(alone, _spread(x, finite, marked, panel.xscale == "log" and not panel.equal))
            marked += 1
        if len(marks):
            line.set_marker(look.mark or "o")
            line.set_markevery(marks.tolist())
            many = len(marks) > 60
            line.set_markersize(3.0 if many else 6.5 if series.ours else 5.5)
            line.set(
                markeredgecolor=PAGE, markeredgewidth=0.0 if many else 0.7
            )  # a rim, so that marks show on noisy curves
        if values.single(i):  # a point of interest, which no curve may hide
            line.set(markersize=8.0, zorder=3.5)
    axes.margins(x=0.02)
    if axes.get_xscale() == "linear" and values.any:
        axes.xaxis.set_major_locator(MaxNLocator("auto", steps=(1, 2, 5, 10)))  # iterations have no halves
    _only_ticks(axes, panel, values)
    if values.names:
        _name_ticks(axes, values.names)


def _only_ticks(axes: Axes, panel: Panel, values: Values) -> None:
    """Ticks where the points are, where all series are points at a few places: 1, 2, 5 steps, and no 1.5."""
    places = sorted({float(x) for xs, _ in values.points for x in xs[np.isfinite(xs)]})
    if values.names or not 1 < len(places) <= FEW or not all(one.points for one in panel.series) or panel.equal:
        return
    axes.set_xticks(places, [f"{place:g}" for place in places])
    axes.set_xticks([], minor=True)


def _spread(x: Array, finite: Array, turn: int, log: bool, wanted: int = 6) -> Array:
    """A few places about evenly along the axis, shifted a little from curve to curve so that marks don't hide marks."""
    if len(finite) <= wanted * 2:
        return finite
    along = np.log(x[finite]) if log else x[finite]
    if np.any(np.diff(along) < 0) or along[0] == along[-1]:  # a path: evenly in time
        along = np.arange(len(finite), dtype=float)
    shift = (turn * 0.381966) % 1.0
    targets = along[0] + (along[-1] - along[0]) * (np.arange(wanted) + 0.1 + 0.8 * shift) / wanted
    return finite[np.unique(np.searchsorted(along, targets).clip(0, len(finite) - 1))]


def _bars(axes: Axes, panel: Panel, values: Values) -> None:
    width = 0.82 / max(1, len(panel.series))
    if panel.yscale == "log" and values.any:
        axes.set_yscale("log")
    for i, (series, look, (x, y)) in enumerate(zip(panel.series, looks(panel), values.points, strict=True)):
        at = x + (i - (len(panel.series) - 1) / 2) * width
        good = np.isfinite(y)
        if good.any():
            for bar in axes.bar(at[good], y[good], width * 0.9, linewidth=1.0, zorder=2):
                _paint_bar(bar, look)
        if series.low is not None and series.high is not None:
            low, high = (numeric(edge, len(y), panel.yscale == "log") for edge in (series.low, series.high))
            both = good & np.isfinite(low + high)
            axes.vlines(at[both], low[both], high[both], color=TEXT, linewidth=1.4, zorder=3)
        for place in at[~good] if values.any else ():
            axes.text(
                place, 0.015, "no value" if len(panel.series) * len(values.names) < 24 else "×", rotation=90, fontsize=7.5,
                ha="center", va="bottom", transform=axes.get_xaxis_transform(),
            )  # fmt: skip
    axes.grid(False, axis="x")
    if values.names:
        _name_ticks(axes, values.names)
        axes.set_xlim(-0.6, len(values.names) - 0.4)


def _paint_bar(bar: Rectangle, look: Look) -> None:
    """Ours is full, the others are hatched, a reference is empty."""
    bar.set_edgecolor(look.paint.light)
    bar.set_facecolor(look.paint.light if look.hatch is None else "none")
    if look.hatch:
        bar.set_hatch(look.hatch)


def _name_ticks(axes: Axes, names: Sequence[str]) -> None:
    crowded = len(names) > 6 or max(map(len, names)) > 30
    labels = [textwrap.shorten(name, 26, placeholder="…") if crowded else textwrap.fill(name, 12) for name in names]
    axes.set_xticks(range(len(names)))
    axes.set_xticklabels(
        labels, rotation=35 if crowded else 0, ha="right" if crowded else "center", rotation_mode="anchor"
    )


def _sample(look: Look, bars: bool, single: bool, figure: Figure | None = None) -> Artist:
    """What stands for a series in a legend."""
    if bars:
        box = Rectangle((0.2, 0.1), 0.6, 0.8, linewidth=0.9)
        _paint_bar(box, look)
        artist: Artist = box
    else:
        artist = Line2D(
            (0.02, 0.5, 0.98), (0.5, 0.5, 0.5), color=look.paint.light, linestyle=look.style, linewidth=look.width,
            marker=look.mark, markevery=[1], markersize=4.5, markeredgewidth=0,
        )  # fmt: skip
        if single:
            artist.set(linestyle="none", marker=look.mark or "o", markersize=7.0)
    if figure is not None:
        artist.set_transform(figure.transFigure)
    return artist


def _svg(figure: Figure, transparent: bool = False) -> str:
    buffer = io.StringIO()
    metadata: Any = {"Date": None, "Creator": None, "Format": None, "Type": None}
    figure.savefig(buffer, format="svg", metadata=metadata, transparent=transparent)
    return buffer.getvalue()


def _png(figure: Figure) -> bytes:
    FigureCanvasAgg(figure)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=130, metadata=_BARE)
    return buffer.getvalue()


def _scale(name: str) -> str:
    return "log" if name == "log" else "linear"


def _grey(image: Sequence[Sequence[float]]) -> Array:
    return np.clip(np.nan_to_num(np.array(image, dtype=float), nan=0.0), 0.0, 1.0)
