"""What `sensitivity` found: a table, numbers, a picture."""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib import import_module
from math import inf, isfinite, isnan, nan
from os import PathLike
from typing import Any

import numpy as np

_FAR = 1e6  # plots end this many times beyond what is typical
_FULL = 10.0  # the colours of the map end at so many times the best score


@dataclass(frozen=True)
class Cell:
    """One pair of first steps, and the mean score over the seeds."""

    alpha: float
    beta: float
    score: float


@dataclass(frozen=True)
class SensitivityReport:
    """What `sensitivity` found. Print it.

    Attributes:
        alphas: The upper steps that were tried.
        betas: The lower steps that were tried.
        seeds: The seeds.
        scores: The score of each run, smaller is better: alphas x betas x seeds. A run that failed has inf.
        checks: Trial points an iteration, both levels together, in the same shape.
        curves: The upper loss over the iterations: alphas x betas x seeds x steps; NaN where a run had ended.
        failures: Why runs failed, by (alpha, beta, seed).
    """

    alphas: tuple[float, ...]
    betas: tuple[float, ...]
    seeds: tuple[int, ...]
    scores: np.ndarray
    checks: np.ndarray
    curves: np.ndarray
    failures: dict[tuple[float, float, int], str] = field(default_factory=dict)

    @property
    def means(self) -> np.ndarray:
        """The scores averaged over the seeds: alphas x betas."""
        return self.scores.mean(axis=2)

    @property
    def best(self) -> Cell:
        """The pair with the smallest mean score."""
        return self._cell(int(self.means.argmin()))

    @property
    def worst(self) -> Cell:
        """The pair with the largest mean score."""
        return self._cell(int(self.means.argmax()))

    @property
    def median(self) -> float:
        """The median of the mean scores: what a pair picked blindly gives."""
        return float(np.median(np.sort(self.means, axis=None)))

    @property
    def spread(self) -> float:
        """Worst over best: 1 where the first steps do not matter, inf where some pair fails; NaN for scores below 0."""
        best, worst = self.best.score, self.worst.score
        if best == worst:
            return nan if best == inf else 1.0
        if best == 0 or worst == inf:
            return inf
        return worst / best if best > 0 else nan

    def _cell(self, index: int) -> Cell:
        i, j = divmod(index, len(self.betas))
        return Cell(self.alphas[i], self.betas[j], float(self.means[i, j]))

    def __str__(self) -> str:
        best, worst = self.best, self.worst
        seeds = f"{len(self.seeds)} seed{'s' if len(self.seeds) > 1 else ''}"
        title = "alpha \\ beta"
        lines = [
            f"sensitivity to the first steps: mean score over {seeds}, {self.curves.shape[-1]} iterations a run",
            f"  {title:>12}" + "".join(f"{beta:>12.3g}" for beta in self.betas),
        ]
        for alpha, row in zip(self.alphas, self.means, strict=True):
            lines.append(f"  {alpha:>12.3g}" + "".join(f"{score:>12.4g}" for score in row))
        lines += [
            f"  best    {best.score:.4g}  (alpha {best.alpha:g}, beta {best.beta:g})",
            f"  worst   {worst.score:.4g}  (alpha {worst.alpha:g}, beta {worst.beta:g})",
            f"  median  {self.median:.4g}",
            f"  spread  {self.spread:.3g}  (worst / best)",
            f"  checks  {np.nanmean(self.checks) if np.isfinite(self.checks).any() else nan:.1f} an iteration",
        ]
        for (alpha, beta, seed), reason in self.failures.items():
            lines.append(f"  failed: alpha {alpha:g}, beta {beta:g}, seed {seed}: {reason}")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, strings and lists; NaN is None and infinities are strings, so that it is strict JSON."""

        def plain(value: Any) -> Any:
            if isinstance(value, list | tuple):
                return [plain(entry) for entry in value]
            if isinstance(value, float) and not isfinite(value):
                return None if isnan(value) else str(value)
            return value

        cells = {name: getattr(self, name) for name in ("best", "worst")}
        return {
            "alphas": list(self.alphas),
            "betas": list(self.betas),
            "seeds": list(self.seeds),
            "scores": plain(self.scores.tolist()),
            "checks": plain(self.checks.tolist()),
            "curves": plain(self.curves.tolist()),
            **{name: {"alpha": c.alpha, "beta": c.beta, "score": plain(c.score)} for name, c in cells.items()},
            "median": plain(self.median),
            "spread": plain(self.spread),
            "failures": [
                {"alpha": alpha, "beta": beta, "seed": seed, "reason": reason}
                for (alpha, beta, seed), reason in self.failures.items()
            ],
        }

    def _ratios(self) -> tuple[np.ndarray, str]:
        """What the colours of the map show, 1 for the best cell, and its name."""
        means, best = self.means, self.best.score
        if 0 < best < inf:
            return means / best, "score / best score (smaller is better)"
        # scores at or below 0 have no ratio: the distance from the best, in units of a typical score
        finite = np.abs(means[np.isfinite(means)])
        unit = float(np.median(finite)) if finite.size else 0.0
        unit = unit or (float(finite.max()) if finite.size else 0.0) or 1.0
        return 1.0 + (means - best) / unit if isfinite(best) else means, "1 + (score - best) / typical size of a score"

    def plot(self, path: str | PathLike[str] | None = None) -> Any:
        """A heat map of the scores, and the upper loss of every run, as a matplotlib figure.

        The colours of the map are those of the score over the best one, from 1 to 10 and beyond, whatever the scores are: where
        the first steps do not matter the map is of one colour.

        Args:
            path: Also save it here; the ending says the format.

        Raises:
            ImportError: matplotlib is not installed.
        """
        try:
            figures, colors = import_module("matplotlib.figure"), import_module("matplotlib.colors")
        except ImportError as error:
            raise ImportError("`SensitivityReport.plot()` needs matplotlib: pip install 'bisls[cli]'") from error
        figure = figures.Figure(figsize=(11, 4.5), layout="tight")
        heat, lines = figure.subplots(1, 2)
        means = self.means
        ratios, label = self._ratios()
        # the same scale for every map: cells that are 2 % apart must not look like the ends of the world
        norm = colors.LogNorm(1.0, _FULL, clip=True)
        shown = heat.imshow(np.ma.masked_invalid(ratios), norm=norm, cmap="viridis_r", aspect="auto", origin="lower")
        ticks = [tick for tick in (1, 1.5, 2, 3, 5, 10) if tick <= _FULL]
        bar = figure.colorbar(shown, ax=heat, label=label, extend="max", ticks=ticks)
        bar.ax.set_yticklabels([f"{tick:g}" for tick in ticks])
        bar.ax.minorticks_off()
        heat.set_xticks(range(len(self.betas)), [f"{beta:g}" for beta in self.betas])
        heat.set_yticks(range(len(self.alphas)), [f"{alpha:g}" for alpha in self.alphas])
        heat.set_xlabel(r"lower first step $\beta$")
        heat.set_ylabel(r"upper first step $\alpha$")
        for i, j in np.ndindex(*means.shape):
            text = f"{means[i, j]:.3g}" if isfinite(means[i, j]) else "failed"
            box = {"facecolor": "white", "alpha": 0.6, "edgecolor": "none", "pad": 1.5}
            heat.text(j, i, text, ha="center", va="center", fontsize=8, bbox=box)
        starts = self.curves[..., 0]
        typical = np.nanmedian(np.abs(starts)) if np.isfinite(starts).any() else 1.0
        curves = np.where(
            np.abs(self.curves) <= _FAR * typical, self.curves, nan
        )  # a run that diverges leaves the picture
        best = (self.alphas.index(self.best.alpha), self.betas.index(self.best.beta))
        for i, j in np.ndindex(*means.shape):
            for s, curve in enumerate(curves[i, j]):
                own = (
                    {"color": "C1", "zorder": 3, "label": "best pair"}
                    if (i, j) == best
                    else {"color": "C0", "alpha": 0.4}
                )
                lines.plot(curve, linewidth=1.0, **(own if s == 0 else {**own, "label": None}))
        drawn = curves[np.isfinite(curves)]
        if drawn.size and drawn.min() > 0:
            lines.set_yscale("log")
        lines.set_xlabel("k, outer iteration")
        lines.set_ylabel("upper loss f")
        lines.legend()
        lines.grid(alpha=0.3)
        if path is not None:
            figure.savefig(path)
        return figure
