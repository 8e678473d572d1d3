"""What two processes do together that `torchrun` has started; each writes what it came to into a file. See `test_training`."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import sys
from datetime import timedelta
from pathlib import Path
from types import ModuleType

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import bisls

EXAMPLES = Path(__file__).parent.parent / "examples"


def example(name: str) -> ModuleType:
    """The module of an example."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def leaves(value, place=""):
    """Every number and tensor in a state, with its place."""
    if isinstance(value, dict):
        for name, own in value.items():
            yield from leaves(own, f"{place}.{name}")
    elif isinstance(value, list | tuple):
        for i, own in enumerate(value):
            yield from leaves(own, f"{place}.{i}")
    else:
        yield place, value.detach().clone() if isinstance(value, Tensor) else value


def ended(run: dict) -> dict[str, object]:
    """All that a run of the example has come to: parameters, statistics, the optimiser, the schedule, random numbers."""
    states = {name: run[name].state_dict() for name in ("model", "optimizer", "schedule")}
    return dict(leaves({**states, "trust": run["trust"], "random": torch.get_rng_state()}))


def digest(state: dict[str, object]) -> dict[str, str]:
    """Short texts that differ where a bit does."""

    def text(value) -> str:
        if isinstance(value, Tensor):
            return hashlib.sha256(value.contiguous().flatten().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]
        return repr(value)

    return {name: text(value) for name, value in state.items() if not callable(value)}


class Interrupted(Exception):
    """A step that never came to its end."""


def stopping(path: Path, end) -> None:
    """Let ``end()`` happen in the midst of lower steps: at the fourth of AdamW after a checkpoint was written."""
    step, calls = torch.optim.AdamW.step, []

    def counted(self, *arguments, **options):
        calls.extend([1] if path.exists() else [])
        if len(calls) == 4:
            torch.optim.AdamW.step = step
            end()
        return step(self, *arguments, **options)

    torch.optim.AdamW.step = counted


def shared(rank: int, world: int, wrap=lambda model: model) -> list[float]:
    """Three iterations with a network on a share of the data: x, and the size of y."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)), torch.zeros(3, requires_grad=True)
    network, draw = wrap(model), torch.Generator().manual_seed(1)
    images, labels = torch.randn(7, 24, 5, generator=draw), torch.randint(0, 3, (7, 24), generator=draw)
    own = slice(rank * 24 // world, (rank + 1) * 24 // world)

    def weighted(batch):
        return (3 * x.softmax(0)[batch[1]] * cross_entropy(network(batch[0]), batch[1], reduction="none")).mean()

    problem = bisls.Bilevel(lambda b: cross_entropy(network(b[0]), b[1]), weighted, [x], model.parameters())
    solver = bisls.BiSLS(problem, lower_optimizer=torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))
    batches = [(images[i, own], labels[i, own]) for i in range(7)]
    for _ in range(3):
        record = solver.step(batches[0], batches[1:])
    assert record.view == "t-step"
    assert record.alpha > 0
    return [*x.tolist(), problem.y.read().norm().item()]


def main(folder: Path) -> None:
    twin = example("training_bilevel")

    def run(name: str) -> dict:
        return twin.main(["--epochs", "2", "--checkpoint", str(folder / name)])

    found = {"whole": digest(ended(run("whole.pt")))}
    rank = dist.get_rank()
    if rank == 1:

        def fail():
            raise Interrupted("the ink is dry")

        stopping(folder / "cut.pt", fail)
    try:
        run("cut.pt")
    except Exception as error:
        found["said"] = f"{type(error).__name__}: {error}"
    dist.destroy_process_group()  # as it would be for processes that are started again
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2, timeout=timedelta(seconds=30))
    found["resumed"] = digest(ended(run("cut.pt")))
    found["wrapped"] = shared(rank, 2, DistributedDataParallel)
    try:  # one of them has a batch more
        x, y = torch.zeros(2, requires_grad=True), torch.zeros(2, requires_grad=True)
        loss = lambda b: ((y - x - b) ** 2).sum()  # noqa: E731
        solver = bisls.BiSLS(bisls.Bilevel(loss, loss, [x], [y]), lower_optimizer=torch.optim.SGD([y], 0.1))
        solver.step(torch.ones(2), [torch.ones(2)] * (3 + rank))
    except Exception as error:
        found["uneven"] = f"{type(error).__name__}: {error}"
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
