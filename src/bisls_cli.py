"""The command `bisls`: what a command needs is imported when it runs, so that `--version` and `--help` answer at once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module, metadata
from pathlib import Path
from typing import Annotated

try:
    import typer
    from rich.console import Console
except ModuleNotFoundError as missing:  # pragma: no cover - the tests' environment has the extra
    sys.exit(f"the bisls command needs {missing.name}: pip install 'bisls[cli]'")

app = typer.Typer(
    help="Optimisation whose step sizes set themselves.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"bisls {metadata.version('bisls')}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Optimisation whose step sizes set themselves."""


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the plot.", file_okay=False)] = Path("out"),
    steps: Annotated[int, typer.Option(min=1, help="Upper iterations of each run.")] = 200,
    seed: Annotated[int, typer.Option(help="Seed.")] = 0,
) -> None:
    """Tune 30 penalties with no learning rate at either level, beside a grid of Adam; print a table and save a plot.

    Example: bisls demo --steps 50 --out /tmp/demo
    """
    from bisls.demo import run_demo

    console = Console(emoji=False)
    try:
        path = run_demo(out, steps, seed, console)
    except OSError as error:
        raise _refused(out, error) from None
    typer.echo(f"plot: {path}")  # not by rich: a path may look like markup


@app.command()
def data(
    names: Annotated[list[str] | None, typer.Argument(metavar="NAME", help="Data sets to fetch.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Fetch all of them.")] = False,
) -> None:
    """List the data sets and where they are; with names, fetch and verify them.

    They are looked for in the folder BISLS_DATA, then in the cache (BISLS_CACHE), then downloaded into the cache.

    Examples: bisls data; bisls data mnist w8a; BISLS_DATA=folder bisls data --all
    """
    from bisls import data as sets

    sourced = [name for name, dataset in sets.DATASETS.items() if dataset.sources]
    wanted = list(dict.fromkeys([*(names or []), *(sourced if everything else [])]))
    for name in wanted:
        if name not in sets.DATASETS:
            raise typer.BadParameter(f"{name!r} is none of {', '.join(sets.DATASETS)}", param_hint="NAME")
    if not wanted:
        from bisls.console import show_data

        show_data(Console(emoji=False))
    failed = False
    for name in wanted:
        try:
            paths = sets.fetch(name, Console(stderr=True, emoji=False))
            typer.echo(f"{name}: {paths[0] if len(paths) == 1 else paths[0].parent}")
        except (sets.DataError, ImportError) as error:
            typer.echo(str(error), err=True)
            failed = True
    raise typer.Exit(int(failed))


@app.command(name="list")
def list_figures() -> None:
    """List the figures that can be reproduced: name, what it is about, which data it needs.

    Example: bisls list
    """
    from bisls.console import show_figures

    show_figures(Console(emoji=False))


def _make_folder(out: Path) -> None:
    """Before the work, so that a folder that can't be written is said at once."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _refused(out, error) from None


def _refused(out: Path, error: OSError, more: str = "") -> typer.Exit:
    """Say that the disk refused; how the command ends then."""
    typer.echo(f"cannot write to --out {out}: {error.strerror or error}{more}", err=True)
    return typer.Exit(1)


def _complete(known: str) -> Callable[[str], list[str]]:
    """Completion of names that are looked up only when they are asked for."""

    def names(incomplete: str) -> list[str]:
        module, name = known.split(":")
        return [one for one in getattr(import_module(module), name) if one.startswith(incomplete)]

    return names


@app.command()
def reproduce(
    figures: Annotated[
        list[str] | None,
        typer.Argument(
            help="Names as `bisls list` shows them; none means all.",
            show_default=False,
            autocompletion=_complete("bisls.experiments:NAMES"),
        ),
    ] = None,
    scale: Annotated[
        str,
        typer.Option(
            help="smoke (minutes, shipped data), quick (about an hour on two cores), standard (half a day), paper (weeks).",
            autocompletion=_complete("bisls.experiments:SCALES"),
        ),
    ] = "quick",
    seeds: Annotated[int | None, typer.Option(min=1, help="Seeds for each setting (default: 1, 1, 3, 5).")] = None,
    reading: Annotated[
        str, typer.Option(help="How the tasks are read: paper, penalised, pool, once, divided, second.")
    ] = "paper",
    jobs: Annotated[int, typer.Option(min=1, help="Runs side by side, one thread each.")] = os.cpu_count() or 1,
    backend: Annotated[
        str,
        typer.Option(
            help="local, dask or ray (the last two: also a cluster).",
            autocompletion=_complete("bisls.experiments:BACKENDS"),
        ),
    ] = "local",
    out: Annotated[
        Path | None,
        typer.Option(help="Folder of runs, outcomes, plots and page.  [default: out/SCALE]", file_okay=False),
    ] = None,
) -> None:
    """Run the paper's experiments, judge its claims, and write one page with all of it.

    Finished runs are kept in OUT/runs: the same command goes on where it was stopped, and repeats nothing. Exit codes: 0 done
    (whatever the verdicts are), 1 something could not be done, 2 the command was misused, 130 interrupted.

    Examples:

      bisls reproduce --scale smoke

      bisls reproduce demo_2 quadratics --scale quick --jobs 4

      DASK_SCHEDULER_ADDRESS=tcp://head:8786 bisls reproduce --scale paper --backend dask
    """
    from bisls.console import UsageError, chosen_figures, of_one_kind, planned, run_reproduce, with_data, write_page
    from bisls.experiments import SweepError
    from bisls.report import EMPTY, ReportError, count

    console = Console(emoji=False)
    out = out or Path("out") / (scale if reading == "paper" else f"{scale}-{reading}")
    try:
        plan = planned(scale, seeds, reading, backend)
        chosen = chosen_figures(figures or [])
        out.mkdir(parents=True, exist_ok=True)
        of_one_kind(out, scale, reading)
        ready, left_out = with_data(chosen, plan, console)
        outcomes, display = run_reproduce(ready, plan, out, jobs, backend, console)
        page, shown = write_page(out) if outcomes else (None, ())
    except UsageError as error:
        raise typer.BadParameter(str(error)) from None
    except KeyboardInterrupt:
        typer.echo(
            f"\nstopped; finished runs are kept in {out / 'runs'}: the same command goes on from there", err=True
        )
        raise typer.Exit(130) from None
    except (SweepError, ReportError) as error:
        typer.echo(f"{error}. Finished runs are kept", err=True)
        raise typer.Exit(1) from None
    except OSError as error:
        raise _refused(out, error, "; finished runs are kept") from None
    if page is not None:
        verdicts = [verdict for outcome in shown for verdict in outcome.verdicts]
        console.print(f"the paper's claims: {count(verdicts, ours=False)}; our default: {count(verdicts, ours=True)}")
        if scale in EMPTY:
            console.print(f"at the scale {scale} verdicts mean nothing: it only shows that everything runs")
        console.print(
            f"{display.finished} runs made, {display.found} found made, {display.lost} of the new ones diverged"
        )
        typer.echo(f"page: {page}")
    if left_out or display.broken:
        typer.echo(f"left out: {', '.join([*left_out, *display.broken])} (the reasons are above)", err=True)
        raise typer.Exit(1)


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(help="The folder that `bisls reproduce` wrote to.", file_okay=False)] = Path(
        "out/quick"
    ),
    show: Annotated[bool, typer.Option("--open/--no-open", help="Open the page in the browser.")] = False,
    markdown: Annotated[
        Path | None, typer.Option(help="Write a Markdown page too, with its plots beside it.", dir_okay=False)
    ] = None,
    images: Annotated[str, typer.Option(help="The folder of its plots, seen from the Markdown page.")] = "plots",
    keep: Annotated[bool, typer.Option("--keep", help="Leave other figures of the Markdown page.")] = False,
) -> None:
    """Write the page again from FOLDER/outcomes, without running anything: FOLDER/report.html and FOLDER/plots.

    Exit codes: 0 written (whatever the verdicts are), 1 the disk refused, 2 there are no outcomes or one can't be read.

    Examples:

      bisls report out/smoke --open

      bisls report out/quick --markdown docs/reproduction.md --images plots/quick --keep
    """
    from bisls.console import write_page
    from bisls.experiments import NAMES
    from bisls.report import ReportError, count, write_markdown

    try:
        page, outcomes = write_page(folder)
        second = write_markdown(outcomes, markdown, images, keep=keep, order=NAMES) if markdown else None
    except ReportError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None
    except OSError as error:
        typer.echo(f"cannot read or write {error.filename or folder}: {error.strerror or error}", err=True)
        raise typer.Exit(1) from None
    verdicts = [verdict for outcome in outcomes for verdict in outcome.verdicts]
    typer.echo(f"the paper's claims: {count(verdicts, ours=False)}; about our default: {count(verdicts, ours=True)}")
    for path in filter(None, (page, second)):
        typer.echo(f"page: {path}")
    if show:
        import webbrowser

        webbrowser.open(page.resolve().as_uri())


@app.command(name="fit")
def fit_table(
    table: Annotated[Path, typer.Argument(help="A CSV or Parquet file with a header.", show_default=False)],
    target: Annotated[str, typer.Option(help="The column to predict.", show_default=False)],
    groups: Annotated[
        str,
        typer.Option(
            help="auto (a text column each, numbers whose names begin alike), none, or a file: JSON "
            '{"group": ["column", ...]} or CSV with the columns "column" and "group".'
        ),
    ] = "auto",
    unpenalised: Annotated[
        list[str] | None, typer.Option(help="Columns that are never penalised: a,b.", show_default=False)
    ] = None,
    task: Annotated[str, typer.Option(help="auto, classification or regression.")] = "auto",
    out: Annotated[
        Path | None, typer.Option(help="Folder of model and page.  [default: out/NAME OF TABLE]", file_okay=False)
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the folds.")] = 0,
) -> None:
    """Fit a table: penalties by group of columns, tuned by nested cross-validation; a model, and a page with a verdict.

    A command that was stopped goes on. Exit codes: 0 done, 1 the disk refused, 2 the table can't be used, 130 interrupted.

    Examples:

      bisls fit houses.csv --target price

      bisls fit patients.parquet --target outcome --groups groups.json --unpenalised age,sex --out out/patients
    """
    from bisls.tables.command import fit_command
    from bisls.tables.fitting import Asked

    if task not in ("auto", "classification", "regression"):
        raise typer.BadParameter(f"{task!r} is none of auto, classification, regression", param_hint="--task")
    asked = Asked(table, target, groups, tuple(unpenalised or ()), task, seed)
    raise typer.Exit(fit_command(asked, out or Path("out") / table.stem))


@app.command()
def predict(
    model: Annotated[Path, typer.Argument(help="model.json of `bisls fit`, or its folder.", show_default=False)],
    table: Annotated[Path, typer.Argument(help="A CSV or Parquet file with the same columns.", show_default=False)],
    out: Annotated[
        Path | None, typer.Option(help="The CSV file to write.  [default: TABLE-predictions.csv]", dir_okay=False)
    ] = None,
) -> None:
    """Predict the rows of a table with a model of `bisls fit`; where the target is there, say how good it was.

    Example: bisls predict out/houses new.csv --out predicted.csv
    """
    from bisls.tables.command import predict_command

    raise typer.Exit(predict_command(model, table, out or Path(f"{table.stem}-predictions.csv")))


@app.command()
def sensitivity(
    task: Annotated[str, typer.Argument(help="penalties, penalties-exp, ridge, cleaning or quadratic.")] = "penalties",
    method: Annotated[str, typer.Option(help="bisls, paper, bisps, adam or sgd.")] = "bisls",
    steps: Annotated[int, typer.Option(min=1, help="Upper iterations of each run.")] = 100,
    seeds: Annotated[int, typer.Option(min=1, help="Seeds for each pair of starts.")] = 1,
    out: Annotated[Path, typer.Option(help="Folder for the plot and the numbers.", file_okay=False)] = Path("out"),
) -> None:
    """Sweep both first steps over six orders of magnitude on a ready task, and report how far the results are apart.

    Examples:

      bisls sensitivity penalties

      bisls sensitivity penalties --method adam --steps 200
    """
    from bisls.console import SWEPT, UsageError, run_sensitivity

    _make_folder(out)
    try:
        report = run_sensitivity(task, method, steps, seeds)
    except UsageError as error:
        raise typer.BadParameter(str(error)) from None
    except KeyboardInterrupt:
        typer.echo("stopped", err=True)
        raise typer.Exit(130) from None
    typer.echo(f"{task}, {SWEPT[method]}; the score is the exact F at the end\n{report}")
    try:
        path = out / f"sensitivity-{task}-{method}.png"
        report.plot(path)
        path.with_suffix(".json").write_text(json.dumps(report.to_dict()), encoding="utf-8")
    except OSError as error:
        raise _refused(out, error) from None
    typer.echo(f"plot: {path}")


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def bench(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="Which benchmark; none lists them.", show_default=False)] = "",
) -> None:
    """Run a benchmark of the source checkout; what follows its name goes to it.

    Examples:

      bisls bench

      bisls bench regret --tasks penalties

      bisls bench scaling --quick
    """
    folder = Path(__file__).parents[1] / "benchmarks"
    scripts = {
        path.stem: path for path in sorted(folder.glob("*.py")) if "def main" in path.read_text(encoding="utf-8")
    }
    if not scripts:
        typer.echo(
            "benchmarks are part of the source checkout, not of the installed package: clone the repository", err=True
        )
        raise typer.Exit(1)
    if not name:
        for stem, path in scripts.items():
            first = path.read_text(encoding="utf-8").split('"""')[1].strip().splitlines()[0]
            typer.echo(f"{stem:12} {first}")
        return
    if name not in scripts:
        raise typer.BadParameter(f"{name!r} is none of {', '.join(scripts)}", param_hint="NAME")
    raise typer.Exit(subprocess.run([sys.executable, str(scripts[name]), *context.args], check=False).returncode)


def main() -> None:
    """Run the command."""
    try:
        app()
    except ImportError as error:
        # typer and rich came with something else, the rest of the extra did not
        if isinstance(error, ModuleNotFoundError) and error.name and not error.name.startswith("bisls"):
            sys.exit(f"this command needs {error.name.split('.')[0]}: pip install 'bisls[cli]'")
        if "pip install" in str(error):  # the library says what is missing and how to get it
            sys.exit(str(error))
        raise
