"""What a loss can reach is found without calling any of it."""

import contextvars
import functools
import importlib
import logging
import random
import sys
import types

import numpy as np
import pytest
import scipy.stats
import torch

import bisls
from bisls.randomness import same_state, state_of
from bisls.surroundings import Surroundings


class Holder:
    rng = random.Random(1)

    def __init__(self):
        self.parts = [{"own": np.random.default_rng(0)}]

    def loss(self, batch):
        return self.parts[0]["own"].normal() + self.rng.random() + helper()


module_wide = np.random.RandomState(5)


def helper():
    return module_wide.normal()


def test_generators_are_found_wherever_a_loss_can_reach():
    holder = Holder()
    found = Surroundings(holder.loss)
    assert {type(one) for one in found.generators} == {random.Random, np.random.Generator, np.random.RandomState}


def test_plain_values_and_arrays_of_numbers_hide_nothing():
    weight, table = [1.0], {"small": np.ones(2), "large": np.ones(100_000)}
    found = Surroundings(lambda batch: weight[0] * batch + table["small"].sum() + table["large"].sum())
    assert found.opaque is None
    assert not found.numpy
    assert not found.python
    table["large"] = np.array([random.Random(0)], dtype=object)
    assert Surroundings(lambda batch: table["large"]).opaque is not None


def test_what_nobody_can_see_into_is_said():
    rows = iter([1, 2, 3])
    assert Surroundings(lambda batch: next(rows)).opaque is not None
    assert Surroundings(lambda batch: batch).opaque is None


NOISE = """
import random
import numpy as np
import torch
own = np.random.default_rng(0)
torchs = torch.Generator().manual_seed(1)
def draw_own(): return float(own.normal())
def draw_torchs(): return float(torch.randn((), generator=torchs))
def draw_numpys(): return float(np.random.normal())
def draw_pythons(): return random.gauss(0, 1)
def draw_there():
    from . import noise as other
    return other.draw_own()
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package with a module that draws from all kinds of generators."""
    (tmp_path / "dotted").mkdir()
    (tmp_path / "dotted" / "__init__.py").write_text("")
    (tmp_path / "dotted" / "noise.py").write_text(NOISE)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("dotted.noise")
    for name in ("dotted.noise", "dotted"):
        sys.modules.pop(name, None)


def function(text, **scope):
    """A function, made of text, that has these globals."""
    own = {"__name__": "the_users_own", **scope}
    exec(text, own)
    return own["loss"]


def replayed(draw, *generators):
    """Whether a probe of a loss sees the same noise again and leaves no trace in the generators."""
    x, y = torch.zeros(2, requires_grad=True), torch.ones(2, requires_grad=True)
    problem = bisls.Bilevel(lambda _: ((y - x - 1) ** 2).sum() + draw(), lambda _: ((y - x) ** 2).sum(), [x], [y])
    oracle = bisls.Oracle(problem)
    first = oracle.upper(None)
    before = [state_of(one) for one in generators]
    again = oracle.upper_value(None, first.moment)
    after = [state_of(one) for one in generators]
    return again == first.value and all(map(same_state, before, after))


NUMPYS, PYTHONS = np.random.mtrand._rand, random._inst
WAYS = {
    "dotted": "def loss(): return dotted.noise.draw_{}()",
    "imported on the spot": "def loss():\n import dotted.noise\n return dotted.noise.draw_{}()",
    "imported as": "def loss():\n import dotted.noise as n\n return n.draw_{}()",
    "imported from": "def loss():\n from dotted.noise import draw_{0}\n return draw_{0}()",
    "imported from the package": "def loss():\n from dotted import noise\n return noise.draw_{}()",
    "inside of a function": "def loss():\n def inner():\n  import dotted.noise as n\n  return n.draw_{}()\n return inner()",
}


@pytest.mark.parametrize("what", ["own", "torchs", "numpys", "pythons"])
@pytest.mark.parametrize("way", WAYS)
def test_what_a_module_inside_of_a_module_draws_from_is_put_back_and_drawn_again(way, what, package):
    loss = function(WAYS[way].format(what), dotted=sys.modules["dotted"])
    known = {"own": package.own, "torchs": package.torchs, "numpys": NUMPYS, "pythons": PYTHONS}
    assert replayed(loss, known[what])


def test_a_relative_import_is_followed(package):
    assert replayed(package.draw_there, package.own)


def test_a_module_that_a_closure_or_an_object_holds_is_looked_at(package):
    def closed(module):
        return lambda: module.draw_own() + module.draw_numpys()

    held = types.SimpleNamespace(library=package)
    assert replayed(closed(package), package.own, NUMPYS)
    assert replayed(lambda: held.library.draw_own(), package.own)
    held.library = np
    assert replayed(lambda: held.library.random.normal(), NUMPYS)


def test_a_library_that_draws_from_numpys_generator_is_noticed():
    assert replayed(lambda: float(scipy.stats.norm.rvs()), NUMPYS)
    assert replayed(lambda: float(__import__("numpy").random.normal()), NUMPYS)
    assert replayed(lambda: float(importlib.import_module("numpy").random.normal()), NUMPYS)


def test_a_function_that_is_named_as_one_of_torch_is_looked_into():
    rng = np.random.default_rng(1)

    @functools.wraps(torch.nn.functional.mse_loss)
    def noisy():
        return float(rng.normal())

    assert noisy.__module__ == "torch.nn.functional"
    assert replayed(noisy, rng)
    assert replayed(torch.no_grad()(noisy), rng)  # written in torch, named as it is not


def test_what_a_function_remembers_a_variable_holds_and_a_metaclass_has_is_found():
    @functools.lru_cache
    def made():
        return np.random.default_rng(2)

    variable = contextvars.ContextVar("variable", default=None)
    variable.set(np.random.default_rng(3))

    class Meta(type):
        rng = np.random.default_rng(4)

    class Own(metaclass=Meta):
        pass

    assert replayed(lambda: made().normal(), made())
    assert replayed(lambda: variable.get().normal(), variable.get())
    assert replayed(lambda: type(Own).rng.normal(), Meta.rng)


def test_the_inside_of_a_library_is_followed_only_so_far():
    """A walk over all of it would take longer than the iteration."""
    found = Surroundings(lambda _: scipy.stats.norm.rvs())
    assert found.cut
    assert len(found._seen) < 10_000


def test_an_array_of_a_kind_of_its_own_is_looked_at():
    masked = np.ma.masked
    assert Surroundings(lambda _: masked).opaque is None


def test_a_usual_closure_is_looked_at_quickly():
    # its optimiser, scheduler and logger lead to thousands of things that no loss is computed from
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    logger = logging.getLogger("a user's")

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(2, 3)).sum()
        loss.backward()
        logger.debug("rate %g", scheduler.get_last_lr()[0])
        return loss

    found = Surroundings(closure)
    assert len(found._seen) < 500
    assert (found.cut, found.opaque, found.generators) == (False, None, [])
    assert found.modules
