"""The command `bisls`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

try:
    import typer
    from rich.console import Console
except ModuleNotFoundError as missing:  # pragma: no cover - the tests' environment has the extra
    sys.exit(f"the bisls command needs {missing.name}: pip install 'bisls[cli]'")

from bisls._version import __version__

app = typer.Typer(
    help="Optimisation whose step sizes set themselves.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"bisls {__version__}")
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

    console = Console()
    try:
        path = run_demo(out, steps, seed, console)
    except OSError as error:
        typer.echo(f"cannot write to --out {out}: {error.strerror}", err=True)
        raise typer.Exit(1) from None
    console.print(f"plot: {path}", soft_wrap=True)


def main() -> None:
    """Run the command."""
    app()
