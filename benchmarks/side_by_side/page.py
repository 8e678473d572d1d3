"""The page: tables in plain words and plots, from the rows alone. Nothing is run here."""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import inf
from pathlib import Path
from statistics import mean, median
from typing import Any

from side_by_side.contestants import PEERS, Variant
from side_by_side.networks import Judged
from side_by_side.problems import PROBLEMS, Penalties, Problem

Row = dict[str, Any]
OURS = ("bisls", "BiSLS")


def best(rows: Sequence[Row], kind: str) -> Row | None:
    """The best run of a grid: least F; or soonest at the last goal, then most accurate. None where none ended well."""
    fine = [row for row in rows if row["final"] is not None and row["nan"] is None and not row["error"]]
    if kind == "penalties":
        return min(fine, key=lambda row: (row["final"], row["alpha"], row["beta"]), default=None)

    def order(row: Row) -> tuple[float, float]:
        last = row["arrivals"][-1]
        return inf if last is None else last["iteration"], -row["final"]

    return min(fine, key=order, default=None)


class Results:
    """The last row of every run of one problem, and what the tables ask of them."""

    def __init__(self, rows: Sequence[Row], problem: Problem):
        self.problem = problem
        own = [row for row in rows if row.get("kind") == "run" and row["problem"] == problem.name]
        identity = ("peer", "variant", "alpha", "beta", "iterations", "repeat")
        last = {tuple(row[name] for name in identity): row for row in own}
        self.rows = list(last.values())
        lengths = [row["iterations"] for row in self.rows if row["iterations"] != problem.race]
        self.length = problem.iterations if problem.iterations in lengths else max(lengths, default=0)
        found = [row for row in rows if row.get("kind") == "reference" and row["problem"] == problem.name]
        self.reference = found[-1] if found else None

    def of(self, peer: str, variant: Variant, pair: tuple[float, float] | None = None, long: bool = False) -> list[Row]:
        """Runs of a variant, at one pair of rates or at all."""
        length = self.problem.race if long else self.length
        return [
            row for row in self.rows
            if (row["peer"], row["variant"], row["iterations"]) == (peer, variant.name, length)
            and (pair is None or (row["alpha"], row["beta"]) == pair)
        ]  # fmt: skip

    def entries(self) -> list[tuple[str, Variant]]:
        """Peers and variants that were run, in the order of the table of contestants."""
        all_of_them = [(name, v) for name, peer in PEERS.items() for v in peer.variants(self.problem.kind)]
        return [(name, v) for name, v in all_of_them if self.of(name, v)]

    def arrival(
        self, peer: str, variant: Variant, pair: tuple[float, float], goal: int = -1
    ) -> dict[str, float] | None:
        """The median over repeats of when a goal was reached; from the longer run where the usual one did not."""
        for long in (False, True):
            rows = self.of(peer, variant, pair, long)
            found = [row["arrivals"][goal] for row in rows if row["arrivals"] and row["arrivals"][goal]]
            if found and len(found) == len(rows):
                return {name: median(one[name] for one in found) for name in ("wall", "cpu", "iteration")}
        return None

    def ours(self, goal: int = -1) -> dict[str, float] | None:
        """Our times to a goal, which the others' are divided by."""
        return self.arrival(OURS[0], self.default, self.default.base, goal)

    @property
    def default(self) -> Variant:
        """Ours with nothing set."""
        return Variant(OURS[1])

    def pair(self, peer: str, variant: Variant) -> tuple[float, float]:
        """The rates that a variant is shown with: the shared ones, or the best of its grid where accuracies are compared."""
        if isinstance(self.problem, Penalties):
            return variant.base
        grid = [row for row in self.of(peer, variant) if row["repeat"] == 0]
        found = best(grid, self.problem.kind) or (grid[0] if grid else None)
        return variant.base if found is None else (found["alpha"], found["beta"])

    def timed(self, peer: str, variant: Variant, pair: tuple[float, float]) -> tuple[float, float] | None:
        """The accuracy at the processor's second where all are compared, and the iterations until then."""
        rows = self.of(peer, variant, pair, long=True)
        if not rows or not rows[0].get("curve"):
            return None
        curve = rows[0]["curve"]
        known = [k for k, (t, v) in enumerate(zip(curve["cpu"], curve["values"], strict=True))
                 if t <= self.problem.race_cap and v is not None]  # fmt: skip
        last = known[-getattr(self.problem, "last", 1) :]
        return (mean(curve["values"][k] for k in last), curve["iterations"][last[-1]]) if last else None


def render(rows: Sequence[Row], folder: Path, link: str, before: str = "") -> str:
    """The whole page in Markdown; the plots go into `folder`, and the page refers to them by `link`.

    Problems that have no rows are taken over from `before`, the page as it was, to the letter; so are its notes, and what it
    keeps of earlier runs.
    """
    found = [results for problem in PROBLEMS.values() if (results := Results(rows, problem)).rows]
    made = {}
    for results in found:
        problem = results.problem
        text = _penalties(results) if isinstance(problem, Penalties) else _judged(results)
        picture = f"field-{problem.name}.png"
        folder.mkdir(parents=True, exist_ok=True)
        if plot(results, folder / picture):
            text += f"\n![{problem.says}]({link}{picture})\n"
        made[problem.name] = f"{text}\n{_sessions(rows, problem.name)}"
    sections = []
    for name in PROBLEMS:
        for block in (name, f"{name}, earlier"):
            text = made.get(block) or _between(before, block)
            if text:
                sections.append(_marked(block, text))
    return "\n".join([_head(), _short(found, before), *sections, _tail(rows, before)])


def _marked(name: str, text: str) -> str:
    return f"<!-- {name} -->\n\n{text.strip()}\n\n<!-- end of {name} -->\n"


def _between(page: str, name: str) -> str:
    """What stands between two marks."""
    found = re.search(f"<!-- {name} -->(.*?)<!-- end of {name} -->", page, flags=re.DOTALL)
    return found[1] if found else ""


def _line(page: str, first: str) -> str:
    """The row of a table on a page that begins with this cell."""
    return next((line for line in page.splitlines() if line.startswith(f"| {first} |")), "")


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows]) + "\n"


def _head() -> str:
    return """# Side by side

Libraries for bi-level problems on the same problems, each in an environment of its own. `make field` makes the environments,
runs everything, one process and one thread at a time, and writes the tables of this page.

*Cold start*: the time from launching a new Python process to the first x that is good enough and stays so, imports and compiling
included; files are in the disk cache. Every x is scored by the same code after the run: the exact F(x), the lower problem solved
by Newton's method. Times are ratios to `BiSLS` with nothing set, in the same run of the command: wall time, then CPU time; the
seconds beside them are wall time on the machine named at the end.
"""


def _short(found: Sequence[Results], before: str) -> str:
    """One row a problem: `BiSLS` with nothing set, and the best of the other libraries with and without tuning."""
    made = {}
    for results in found:
        kind = results.problem.kind
        mine = best(results.of(OURS[0], results.default), kind)
        others = [(peer, v) for peer, v in results.entries() if peer != OURS[0]]
        if mine is None or not others:
            continue
        bases = [rows for peer, v in others if (rows := results.of(peer, v, v.base))]
        shared = [best(rows, kind) for rows in bases]
        tuned = [best(results.of(peer, v), kind) for peer, v in others]
        arrived = [
            (at["wall"], _name(peer, v.name))
            for (peer, v), one in zip(others, tuned, strict=True)
            if one is not None and (at := results.arrival(peer, v, (one["alpha"], one["beta"]))) is not None
        ]
        ours, first = results.ours(), min(arrived, default=None)
        made[results.problem.says] = table([], [[
            results.problem.says, _reached(results, mine), _reached(results, best([r for r in shared if r], kind)),
            _reached(results, best([r for r in tuned if r], kind)) if results.problem.tune else "not tuned",
            f"{shared.count(None)} of {len(shared)}",
            "never" if ours is None else _seconds(ours["wall"]),
            "never" if first is None else f"{_ratio(first[0], ours)} {first[1]}",
            f"{len(others) - len(arrived)} of {len(others)}",
        ]]).splitlines()[-1]  # fmt: skip
    body = [line for one in PROBLEMS.values() if (line := made.get(one.says) or _line(before, one.says))]
    if not body:
        return ""
    head = ["problem", "`BiSLS`, nothing set", "best of the others, shared rates", "best of the others, tuned"]
    head += ["of these NaN or stopped at the shared rates", "`BiSLS`: cold start to the goal"]
    head += ["first of the others, ratio to ours", "of these never there"]
    text = "F over the reference (it is not convex: below 1 is better than the reference), or accuracy, after equal iterations. "
    text += "The goal: F within 5 % of the reference, or the last accuracy of the table below."
    return f"## In short\n\n{text}\n\n{table(head, [])}" + "".join(f"{line}\n" for line in body)


def _reached(results: Results, row: Row | None) -> str:
    if row is None:
        return "none"
    who = "" if row["peer"] == OURS[0] else " " + _name(row["peer"], row["variant"])
    if isinstance(results.problem, Penalties) and results.reference:
        return f"{row['final'] / results.reference['F']:.3f}{who}"
    return f"{100 * row['final']:.1f} %{who}"


def _seconds(value: float) -> str:
    return f"{value:.1f} s" if value < 100 else f"{value:.0f} s"


def _ratio(wall: float, ours: dict[str, float] | None, cpu: float | None = None) -> str:
    """Over ours in wall time, in CPU time if it is given, and the seconds of wall time."""
    if not ours:
        return _seconds(wall)
    second = "" if cpu is None else f", {cpu / ours['cpu']:.2f}"
    return f"{wall / ours['wall']:.2f}{second} ({_seconds(wall)})"


def _name(peer: str, variant: str) -> str:
    return f"{PEERS[peer].title}: {variant}"


def _title(peer: str, variant: Variant) -> str:
    name = _name(peer, variant.name)
    return f"**{name}**" if (peer, variant.name) == OURS else name


def _cold(results: Results, peer: str, variant: Variant, pair: tuple[float, float]) -> str:
    """When F came within 5 % of the reference, or why it never did."""
    found = results.arrival(peer, variant, pair)
    if found is not None:
        return _ratio(found["wall"], results.ours(), found["cpu"])
    rows = results.of(peer, variant, pair) + results.of(peer, variant, pair, long=True)
    if not rows:
        return ""
    if any(row["nan"] is not None for row in rows):
        return "never: NaN"
    if any(row["error"] for row in rows):
        return "never: stopped"
    longest = max(rows, key=lambda row: row["done"])
    return f"never in {longest['done']:,} iterations ({_seconds(longest['wall'])})"


def _end(results: Results, rows: Sequence[Row]) -> str:
    """F at the end over the reference; what it was; or what went wrong."""
    errors = [row for row in rows if row["error"]]
    lost = [row for row in rows if row["nan"] is not None]
    if lost:
        return f"NaN after {lost[0]['nan']} iterations"
    finals = [row["final"] for row in rows if row["final"] is not None]
    if not finals:
        return "failed: " + _cut(errors[0]["error"]) if errors else "not finite: no lower minimum at its x"
    value = median(finals)
    text = f"{value / results.reference['F']:.3f} ({value:.4f})" if results.reference else f"{value:.4f}"
    return f"{text}, stopped with an error after {errors[0]['done']} iterations" if errors else text


def _cut(text: str, length: int = 120) -> str:
    text = " ".join(text.replace("|", "/").split())
    return text if len(text) <= length else text[: length - 3] + "..."


def _penalties(results: Results) -> str:
    problem, reference = results.problem, results.reference
    assert isinstance(problem, Penalties)
    lines = [f"## Penalties: {problem.says}\n"]
    if reference:
        lines.append(
            f"F starts at {reference['F0']:.4f}. The reference is {reference['F']:.4f}: the least exact F that L-BFGS with exact "
            "gradients finds in boxes of several sizes and from several starts."
        )
    lines.append(
        f"All but `BiSLS` with nothing set have T = {problem.lower_iters} lower steps, {problem.cg} steps of conjugate gradients "
        f"(where they have such), a warm start, Adam with rate 0.1 above and rate 0.2 below "
        "(Armijo and Polyak of jaxopt: a ceiling of 1, their default); "
        f"{results.length} iterations.\n"
    )
    body, entries = [], results.entries()
    plain = [row for name, v in entries if name == "torch" for row in results.of(name, v, v.base) if row.get("each")]
    scale = median(row["each"][0] for row in plain) if plain else None
    for name, variant in entries:
        rows = results.of(name, variant, variant.base)
        if not rows:
            continue
        each, ready, first = (
            median(row[part][0] for row in rows if row.get(part)) if any(row.get(part) for row in rows) else None
            for part in ("each", "ready", "first")
        )
        speed = "" if each is None else f"{each / scale:.2f}" if scale else f"{1e3 * each:.1f} ms"
        body.append([
            _title(name, variant), _end(results, rows), _cold(results, name, variant, variant.base), speed,
            "" if ready is None else _seconds(ready), "" if first is None else _seconds(first),
        ])  # fmt: skip
    head = [
        "system",
        f"F after {results.length} iterations over the reference",
        "cold start to within 5 %, ratio to ours",
    ]
    head += ["an iteration" + (", ratio to plain torch" if scale else ""), "until ready", "first iteration"]
    lines += [table(head, body), _tuned(results)]
    return "\n".join(lines)


def _tuned(results: Results) -> str:
    body = []
    for name, variant in results.entries():
        rows = [row for row in results.of(name, variant) if row["repeat"] == 0]
        if not variant.grid:
            if (name, variant.name) == OURS and rows:
                cold = _cold(results, name, variant, variant.base)
                body.append([_title(name, variant), "nothing to tune", _end(results, rows), cold, "1 run", "0", cold])
            continue
        if len(rows) < 2:
            continue
        found = best(rows, "penalties")
        bad = sum(row["nan"] is not None or bool(row["error"]) for row in rows)
        spent = sum(row["wall"] for row in rows)
        runs = f"{len(rows)} runs, {_ratio(spent, results.ours())}"
        if found is None:
            body.append([_title(name, variant), "none", "all failed", "", runs, str(bad), ""])
            continue
        pair = found["alpha"], found["beta"]
        arrived = results.arrival(name, variant, pair)
        total = "never" if arrived is None else _ratio(spent + arrived["wall"], results.ours())
        body.append([
            _title(name, variant), f"{pair[0]:g} / {pair[1]:g}", _end(results, [found]),
            _cold(results, name, variant, pair), runs, str(bad), total,
        ])  # fmt: skip
    if len(body) < 2:
        return ""
    head = ["system", "best rates, above / below", "F over the reference", "cold start to within 5 %, ratio to ours"]
    head += ["what tuning cost", "of these NaN or stopped", "cold start with its tuning"]
    text = (
        "With the best rates of its own grid (0.01, 0.1, 1 above; 0.02, 0.2, 2 below; ceilings 1, 10, 100 of a search):"
    )
    return f"{text}\n\n{table(head, body)}"


TITLES = {
    "representation": "Hyper-representation",
    "few-shot": "Few shots",
    "weight-network": "Reweighting, Meta-Weight-Net",
    "sample-weights": "Learning to reweight",
}


def _judged(results: Results) -> str:
    """Accuracies: after how long the goals are reached, and where a run is after equal iterations and after equal time."""
    problem = results.problem
    assert isinstance(problem, Judged)
    entries = results.entries()
    grids: dict[str, list[str]] = {}
    for name, variant in entries:
        if variant.grid and not variant.tuned_as:
            grids.setdefault(_rates(variant.grid), []).append(_name(name, variant.name))
    said = [f"{text} ({', '.join(names)})" for text, names in grids.items()]
    lines = [
        f"## {TITLES[problem.kind]}: {problem.says}\n",
        f"{problem.story(results.length)}\n",
        (
            f"An iteration consumes {problem.samples(1):,} {problem.unit}. A goal is reached at the first of two kept iterations "
            f"in a row that are at or above it. Grids: {'; '.join(said)}."
        ),
    ]
    timed = {(name, v): results.timed(name, v, results.pair(name, v)) for name, v in entries}
    if any(timed.values()):
        lines.append(
            f"Equal time: {problem.race_cap:.0f} seconds of the processor after launch, imports included; in brackets the "
            "iterations until then."
        )
    measured = any("auc" in row.get("measures", {}) for row in results.rows)
    body = []
    for name, variant in entries:
        grid = [row for row in results.of(name, variant) if row["repeat"] == 0]
        pair = results.pair(name, variant)
        rows = results.of(name, variant, pair)
        if not rows:
            continue
        lost = any(row["nan"] is not None for row in rows)
        cells = [_title(name, variant), _rate_names(pair) if variant.grid else "nothing set"]
        for number in range(len(problem.goals)):
            arrived = results.arrival(name, variant, pair, number)
            if arrived is None:
                most = max(row["done"] for row in rows + results.of(name, variant, pair, long=True))
                cells += ["never: NaN" if lost else f"never in {most:,} iterations", ""]
            else:
                cells += [_spent(arrived, results.ours(number)), f"{problem.samples(int(arrived['iteration'])):,}"]
        finals = [row["final"] for row in rows if row["final"] is not None]
        cells.append(f"{100 * median(finals):.1f} %" if finals else "NaN" if lost else "failed")
        if any(timed.values()):
            at = timed[name, variant]
            cells.append("" if at is None else f"{100 * at[0]:.1f} % ({at[1]:,})")
        if measured:
            found = [row["measures"]["auc"] for row in rows if "auc" in row.get("measures", {})]
            cells.append(f"{median(found):.3f}" if found else "")
        each = [row["each"][1] for row in rows if row.get("each")]
        cells.append(f"{1e3 * median(each):.0f} ms" if each else "")
        bad = sum(row["nan"] is not None or bool(row["error"]) for row in grid)
        if variant.tuned_as:
            cells += [f"as {_name(*variant.tuned_as)}", ""]
        elif variant.grid:
            pairs = f"{len(grid)} of {len(variant.pairs)} pairs of rates"
            total = {
                name: sum(row["wall"] if name == "wall" else _cpu(row) for row in grid) for name in ("wall", "cpu")
            }
            cells += [f"{pairs}, {bad} NaN or stopped", _spent(total, results.ours())]
        else:
            cells += ["none", ""]
        body.append(cells)
    head = ["system", "rates, above / below"]
    for goal in problem.goals:
        head += [f"CPU time to {100 * goal:.0f} %, ratio to ours", problem.unit]
    head += [f"accuracy after {results.length} iterations"]
    head += ["after equal time"] * any(timed.values()) + ["AUC"] * measured + ["an iteration, CPU", "tuning"]
    head += [f"its CPU time, ratio to ours to {100 * problem.goals[-1]:.0f} %"]
    return "\n".join([*lines, "", table(head, body)])


def _cpu(row: Row) -> float:
    curve = row.get("curve")
    return curve["cpu"][-1] if curve and curve["cpu"] else 0.0


def _spent(time: dict[str, float], ours: dict[str, float] | None) -> str:
    """The processor's time over ours, its seconds, and those of the wall clock."""
    ratio = "" if not ours else f"{time['cpu'] / ours['cpu']:.2f} "
    return f"{ratio}({_seconds(time['cpu'])}; wall {_seconds(time['wall'])})"


def _rate_names(pair: tuple[float, float]) -> str:
    return f"{pair[0]:g} / {pair[1]:g}" if pair[0] else f"none / {pair[1]:g}"


def _rates(grid: Sequence[tuple[float, float]]) -> str:
    above, below = (", ".join(f"{rate:g}" for rate in dict.fromkeys(side)) for side in zip(*grid, strict=True))
    return f"{below} below" if above == "0" else f"{above} above, {below} below"


def _tail(rows: Sequence[Row], before: str) -> str:
    lines = ["## Who took part\n"]
    versions: dict[str, dict[str, str]] = {}
    for row in rows:
        if row.get("kind") == "run" and row.get("versions"):
            versions[row["peer"]] = row["versions"]
    refused: dict[str, str] = {}
    for row in rows:  # in time order: an environment that was made later is not left out any more
        if row.get("kind") == "skipped":
            refused[row["environment"]] = row["reason"]
        elif row.get("kind") == "made":
            refused.pop(row["environment"], None)
    body = []
    for name, peer in PEERS.items():
        if peer.environment in refused:
            body.append(f"| {peer.title} | left out: {_cut(refused[peer.environment], 200)} |\n")
        elif name in versions:
            used = ", ".join(f"{package} {version}" for package, version in versions[name].items())
            body.append(f"| {peer.title} | {used} |\n")
        elif line := _line(_between(before, "versions"), peer.title):
            body.append(f"{line}\n")
    lines.append(_marked("versions", table(["system", "versions"], []) + "".join(body)))
    left = {row["problem"]: row["reason"] for row in rows if row.get("kind") == "left out"}
    ran = {row["problem"] for row in rows if row.get("kind") == "run"}
    lines += [f"Problem {name} was left out: {reason}.\n" for name, reason in left.items() if name not in ran]
    if notes := _between(before, "notes"):
        lines.append(_marked("notes", notes))
    return "\n".join(lines)


def _sessions(rows: Sequence[Row], problem: str) -> str:
    """The commits and machines that the rows of a problem are from."""
    used = {row.get("session") for row in rows if row.get("kind") == "run" and row["problem"] == problem}
    facts = [row for row in rows if row.get("kind") == "facts" and row["started"] in used]
    if not facts:
        return ""
    machines = dict.fromkeys(
        f"Python {row['python']}, torch {row['torch']}, {row['system']}, {row['processor']}, "
        f"{row['cores']} cores, {row['threads']} thread{'s' if row['threads'] > 1 else ''} a run"
        for row in facts
    )
    commits = dict.fromkeys(row["commit"] for row in facts)
    goes = "Measured" if len(facts) == 1 else f"Measured in {len(facts)} goes"
    return f"{goes}, commit{'s' if len(commits) > 1 else ''} {', '.join(commits)}: {'; '.join(machines)}.\n"


def plot(results: Results, path: Path) -> bool:
    """The score against the time since launch, and bars of the cold start. False where there is nothing to draw."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import LogLocator, NullFormatter

    problem, chosen = results.problem, []
    for name, variant in results.entries():
        pair = results.pair(name, variant)
        rows = results.of(name, variant, pair, long=True) or results.of(name, variant, pair)
        if rows and rows[0].get("curve"):
            chosen.append((name, variant, pair, rows[0]["curve"]))
    if not chosen:
        return False
    figure, (left, right) = plt.subplots(1, 2, figsize=(15, 6), constrained_layout=True, width_ratios=(3, 2))
    colours = dict(zip(PEERS, plt.get_cmap("tab10").colors, strict=True))
    dashes, seen = ("-", "--", ":", "-."), dict.fromkeys(PEERS, 0)
    bars: list[tuple[str, float | None, Any]] = []
    for name, variant, pair, curve in chosen:
        label = _name(name, variant.name)
        style = {
            "color": colours[name],
            "ls": dashes[seen[name] % 4],
            "lw": 3 if seen[name] == 0 and name == OURS[0] else 1.5,
        }
        seen[name] += 1
        clock = curve["wall" if isinstance(problem, Penalties) else "cpu"]
        points = [
            (t, n, v) for t, n, v in zip(clock, curve["iterations"], curve["values"], strict=True) if v is not None
        ]
        if points:
            times, counts, values = zip(*points, strict=True)
            left.plot(times, values, label=label, **style)
            if isinstance(problem, Judged):
                right.plot([problem.samples(n) for n in counts], values, **style)
        arrived = results.arrival(name, variant, pair)
        bars.append((label, None if arrived is None else arrived["wall"], colours[name]))
    left.set(title=problem.says, xscale="log")
    logarithmic = [left.xaxis]
    if isinstance(problem, Penalties):
        left.set(xlabel="s since the process was launched", ylabel="exact F", yscale="log")
        logarithmic.append(left.yaxis)
        if results.reference:
            left.axhline(1.05 * results.reference["F"], color="k", lw=0.8, ls=":")
            least = min(
                [results.reference["F"], *(v for *_, curve in chosen for v in curve["values"] if v is not None)]
            )
            left.set_ylim(0.98 * least, 1.1 * results.reference["F0"])
        right.set(title="cold start to F within 5 % of the reference", xlabel="s")
        bars.reverse()
        right.barh([b[0] for b in bars], [b[1] or 0.0 for b in bars], color=[b[2] for b in bars])
        for number, (_, value, _) in enumerate(bars):
            if value is None:
                right.text(0.0, number, " never", va="center", fontsize=8)
        right.tick_params(axis="y", labelsize=7)
    else:
        values = [v for *_, curve in chosen for v in curve["values"] if v is not None]
        least = 0.5 if problem.goals[0] > 0.8 else max(0.0, min(values) - 0.05)
        left.set(
            xlabel="seconds of the processor since launch",
            ylabel="accuracy",
            ylim=(least, min(1.0, max(values) + 0.05)),
        )
        right.set(xlabel=f"{problem.unit} seen", ylim=left.get_ylim())
        if problem.race:
            right.set_xscale("symlog", linthresh=problem.samples(problem.every))
    for axis in logarithmic:
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter(NullFormatter())
    left.legend(fontsize=7)
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return True
