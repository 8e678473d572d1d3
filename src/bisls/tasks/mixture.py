"""A mixture of sources of text: how much each of them counts is x, a small transformer that reads them is y."""

from __future__ import annotations

import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from bisls._check import FLAG, Wanted, Wrong, require_argument, settled, whole_number
from bisls.bounds import Simplex
from bisls.problem import Bilevel
from bisls.tasks.base import Drawn, Task, streams
from bisls.tasks.inputs import floating
from bisls.tasks.training import anew, drawn

LETTERS = "\n" + "".join(chr(code) for code in range(32, 127))  # every other character is read as a question mark
HELD_OUT = 128  # windows of the target by which the mixture is judged


def _texts(value: Any) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, Sequence) or len(value) < 2:
        raise Wrong
    if not all(isinstance(text, str) for text in value):
        raise Wrong
    return tuple(value)


def mixture(
    sources: Sequence[str] | None = None,
    target: str | None = None,
    *,
    simplex: bool = False,
    context: int = 32,
    windows: int = 8,
    width: int = 32,
    layers: int = 2,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Task:
    """The weights of the sources are the softmax of x, or x itself; the next character of each is predicted by y.

        f(y)    = mean cross-entropy of the next character on windows of the target text
        g(x, y) = sum_i w_i (mean cross-entropy of the next character on windows of source i)

    The weights start equal. With `simplex` they are x itself, with ``upper_bounds=Simplex(floor=1e-3)``: exponentiated steps.

    The first half of the target is what the upper level sees; `exact` is the cross-entropy on 128 windows of the second half, at
    the present y. ``metrics()`` has the accuracy there and the weights. ``retrained()`` trains y from the start with the present
    weights, by 500 steps of Adam.

    Args:
        sources: At least two texts, each of at least 1,000 characters. None takes five out of Python's own library: every second
            help topic, three modules of code, the tables of character encodings, names of HTML entities, and the first of these
            with its letters shuffled. They differ a little from one Python to the next.
        target: A text of at least 1,000 characters; None takes the other help topics. Both or neither of the two are given.
        simplex: Let x be the weights themselves.
        context: Characters that a prediction sees at most, at least 1.
        windows: Of each source, and of the target, in a batch; at least 1.
        width: Of the transformer, an even number, at least 2: two heads.
        layers: Of it, at least 1.
        seed: What the network's start and the windows are drawn from.
        dtype: The precision, torch.float32 or torch.float64.

    Examples:
        >>> task = mixture(["to be or not " * 100, "1 2 3 4 5 6 7 " * 100], "not to be or " * 100, context=8, width=8, layers=1)
        >>> task.problem
        Bilevel(upper_params: 1 tensor, 2 numbers; lower_params: 18 tensors, 2,584 numbers)
        >>> sorted(task.metrics())
        ['accuracy', 'weight_0', 'weight_1']
    """
    call = "mixture"
    floating(call, dtype)
    simplex = settled(call, "simplex", simplex, FLAG)
    context, windows, layers = (
        settled(call, name, value, whole_number(1))
        for name, value in (("context", context), ("windows", windows), ("layers", layers))
    )
    rule = "must be an even number, at least 2"
    width = settled(call, "width", width, Wanted(rule, lambda value: _even(whole_number(2).read(value))))
    if (sources is None) != (target is None):
        raise ValueError(f"`{call}(sources=..., target=...)`: give both or neither")
    if sources is None or target is None:
        sources, target = library()
    sources = settled(call, "sources", sources, Wanted("must be a list of at least two texts", _texts))
    texts = [_numbers(call, f"sources[{i}]", text) for i, text in enumerate(sources)]
    target_text = _numbers(call, "target", target)
    known, unseen = target_text.tensor_split(2)
    shortest = min(len(text) for text in (*texts, known, unseen))
    rule = f"must be shorter than the shortest text, {shortest} (a half of the target counts)"
    require_argument(call, "context", context, context + 1 < shortest, rule)

    start_rng, upper_rng, lower_rng, test_rng, again_rng = streams(call, seed, 5)
    length = context + 1
    test = _windows(unseen, HELD_OUT, length, test_rng)
    network = drawn(Transformer(context, width, layers), start_rng, dtype)
    count = len(texts)
    x = torch.full((count,), 1 / count if simplex else 0.0, dtype=dtype).requires_grad_()

    def weights() -> Tensor:
        return x if simplex else torch.softmax(x, 0)

    def losses(rows: Tensor) -> Tensor:
        outputs = network(rows[:, :-1])
        return functional.cross_entropy(outputs.flatten(0, 1), rows[:, 1:].flatten(), reduction="none")

    def upper_loss(batch: tuple[Tensor, ...]) -> Tensor:
        return losses(batch[0]).mean()

    def lower_loss(batch: tuple[Tensor, ...]) -> Tensor:
        each = losses(batch[0].flatten(0, 1)).view(count, -1).mean(1)
        return (weights() * each).sum()

    @torch.no_grad()
    def exact() -> float:
        return float(losses(test).double().mean())

    @torch.no_grad()
    def metrics() -> dict[str, float]:
        right = (network(test[:, :-1]).argmax(-1) == test[:, 1:]).double().mean()
        return {"accuracy": float(right)} | {f"weight_{i}": float(own) for i, own in enumerate(weights())}

    bounds = Simplex(floor=1e-3) if simplex else None
    problem = Bilevel(upper_loss, lower_loss, [x], network.parameters(), upper_bounds=bounds)
    lower_data = Drawn(
        lambda rng: (torch.stack([_windows(text, windows, length, rng) for text in texts]),), lower_rng.initial_seed()
    )
    return Task(
        call,
        problem,
        Drawn(lambda rng: (_windows(known, windows, length, rng),), upper_rng.initial_seed()),
        lower_data,
        lower_iters=5,
        exact=exact,
        metrics=metrics,
        retrained=anew(problem, lower_data, exact, 500, again_rng.initial_seed()),
    )


def library() -> tuple[tuple[str, ...], str]:
    """Five sources and a target out of Python's own library."""
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise ImportError("`mixture()`: this Python comes without its help topics; pass sources and target") from error
    folder = Path(sysconfig.get_paths()["stdlib"])
    ordered = [topics[name] for name in sorted(topics)]
    prose, target = "\n".join(ordered[::2]), "\n".join(ordered[1::2])

    def read(*names: str) -> str:
        try:
            return "\n".join((folder / name).read_text("utf-8") for name in names)
        except OSError as error:
            raise ImportError(
                f"`mixture()`: this Python comes without the source of its library ({error}); pass sources and target"
            ) from error

    code = read("argparse.py", "turtle.py", "statistics.py")
    tables = read("encodings/cp1250.py", "encodings/cp1252.py", "encodings/cp437.py", "encodings/koi8_r.py")
    order = torch.randperm(len(prose), generator=torch.Generator().manual_seed(0)).tolist()
    return (prose, code, tables, read("html/entities.py"), "".join(prose[i] for i in order)), target


class Layer(nn.Module):
    """Attention with two heads and a layer of four times the width, each normalised before it acts.

    Attention is written out: its fused forms have no second derivatives.
    """

    def __init__(self, width: int):
        super().__init__()
        self.before, self.between = nn.LayerNorm(width, device="meta"), nn.LayerNorm(width, device="meta")
        self.asked = nn.Linear(width, 3 * width, device="meta")
        self.answered = nn.Linear(width, width, device="meta")
        self.wide = nn.Linear(width, 4 * width, device="meta")
        self.narrow = nn.Linear(4 * width, width, device="meta")

    def forward(self, here: Tensor) -> Tensor:
        """N x places x width -> the same."""
        rows, length, _ = here.shape
        asked = torch.chunk(self.asked(self.before(here)), 3, -1)
        query, key, value = (part.view(rows, length, 2, -1).transpose(1, 2) for part in asked)
        later = torch.ones(length, length, dtype=torch.bool, device=here.device).triu(1)
        near = ((query @ key.mT) * key.shape[-1] ** -0.5).masked_fill(later, float("-inf"))
        here = here + self.answered((torch.softmax(near, -1) @ value).transpose(1, 2).flatten(2))
        added: Tensor = self.narrow(functional.gelu(self.wide(self.between(here))))
        return here + added


class Transformer(nn.Module):
    """A small causal transformer over characters."""

    def __init__(self, context: int, width: int, layers: int):
        super().__init__()
        self.letters = nn.Embedding(len(LETTERS), width, device="meta")
        self.places = nn.Embedding(context, width, device="meta")
        self.layers = nn.Sequential(*(Layer(width) for _ in range(layers)))
        self.after = nn.LayerNorm(width, device="meta")
        self.head = nn.Linear(width, len(LETTERS), device="meta")

    def forward(self, rows: Tensor) -> Tensor:
        """What comes next at each place: rows N x places of numbers of letters -> N x places x letters."""
        here = self.letters(rows) + self.places.weight[: rows.shape[1]]
        outputs: Tensor = self.head(self.after(self.layers(here)))
        return outputs


def _numbers(call: str, name: str, text: Any) -> Tensor:
    if not isinstance(text, str) or len(text) < 1_000:
        raise ValueError(f"`{call}({name}=...)` must be a text of at least 1,000 characters")
    places = {letter: i for i, letter in enumerate(LETTERS)}
    return torch.tensor([places.get(letter, places["?"]) for letter in text])


def _windows(text: Tensor, count: int, length: int, rng: torch.Generator) -> Tensor:
    starts = torch.randint(len(text) - length, (count,), generator=rng)
    return text[starts[:, None] + torch.arange(length)]


def _even(value: int) -> int:
    if value % 2:
        raise Wrong
    return value
