"""Try the installed package, from outside of the checkout: what someone sees who has typed `pip install bisls`.

    python -I tests/installed.py VERSION bare    the library alone: it works, and the command says what it needs
    python -I tests/installed.py VERSION cli     with the extra: the commands work

Nothing but the package and what it depends on is imported. Used by tests/release.py and tests/test_release.py.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from importlib.metadata import version
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path

import torch

import bisls
from bisls import optim


def metadata(expected: str) -> None:
    assert Path(sys.prefix) in Path(bisls.__file__).parents, f"{bisls.__file__} is not the installed package"
    assert bisls.__version__ == version("bisls") == expected
    package = files("bisls")
    for name in ("py.typed", "report/page.html", "report/style.css", "experiments/figures/demo_1.py"):
        assert package.joinpath(name).is_file(), f"{name} is missing"


def bilevel(folder: Path) -> None:
    """Twenty iterations lower the exact F, and ten of them with the rest from a checkpoint end at the same numbers."""

    def run(steps: int, **options) -> tuple[bisls.tasks.Task, bisls.History]:
        task = bisls.tasks.quadratic()
        history = bisls.fit(bisls.BiSLS(task.problem), task.upper_data, task.lower_data, steps, False, **options)
        return task, history

    start = bisls.tasks.quadratic().exact()
    whole, history = run(20)
    assert whole.exact() < 0.75 * start, f"F went from {start} to {whole.exact()}"
    assert len(history) == 20
    run(10, checkpoint=folder / "run.pt")
    again, _ = run(20, checkpoint=folder / "run.pt", resume=True)
    assert torch.equal(whole.problem.x.read(), again.problem.x.read())


def optimiser() -> None:
    torch.manual_seed(0)
    model, data = torch.nn.Linear(3, 1), torch.randn(20, 3)
    target = data @ torch.tensor([[1.0], [-2.0], [0.5]])
    optimizer = optim.Auto(model.parameters())

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = ((model(data) - target) ** 2).mean()
        loss.backward()
        return loss

    losses = [optimizer.step(closure).item() for _ in range(50)]
    assert losses[-1] < 0.2 * losses[0], f"the loss went from {losses[0]} to {losses[-1]}"


def command(*arguments: str, folder: Path, fails: bool = False) -> str:
    script = Path(sys.executable).with_name("bisls")
    done = subprocess.run([script, *arguments], capture_output=True, text=True, check=False, cwd=folder)
    said = done.stdout + done.stderr
    assert bool(done.returncode) is fails, f"bisls {' '.join(arguments)}: {done.returncode}\n{said}"
    assert "Traceback" not in said, said
    return said


def main() -> None:
    expected, what = sys.argv[1:]
    metadata(expected)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        bilevel(folder)
        optimiser()
        if what == "bare":
            assert find_spec("typer") is None, "this environment is not bare"
            assert "pip install 'bisls[cli]'" in command("demo", folder=folder, fails=True)
        else:
            assert command("--version", folder=folder).strip() == f"bisls {expected}"
            assert "reproduce" in command("--help", folder=folder)
            assert "demo_1" in command("list", folder=folder)
            command("demo", "--steps", "5", "--out", "made", folder=folder)
            assert (folder / "made" / "demo.png").stat().st_size > 20_000
            assert "clone the repository" in command("bench", folder=folder, fails=True)
    print(f"bisls {expected}, torch {torch.__version__}, {what}: all right")


if __name__ == "__main__":
    main()
