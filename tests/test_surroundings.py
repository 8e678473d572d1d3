"""What a loss can reach is found without calling any of it."""

import random

import numpy as np

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
    assert found.same(Surroundings(holder.loss))
    holder.parts[0]["own"] = np.random.default_rng(1)
    assert not found.same(Surroundings(holder.loss))


def test_surroundings_see_plain_values_change():
    weight, table = [1.0], {"a": np.ones(2)}

    def loss(batch):
        return weight[0] * batch + table["a"].sum()

    found = Surroundings(loss)
    assert found.same(Surroundings(loss))
    assert found.opaque is None
    weight[0] = 1.0 + 1e-15
    assert not found.same(Surroundings(loss))
    weight[0] = 1.0
    assert found.same(Surroundings(loss))
    table["a"][0] = 2.0
    assert not found.same(Surroundings(loss))


def test_what_nobody_can_see_into_is_said():
    rows = iter([1, 2, 3])
    assert Surroundings(lambda batch: next(rows)).opaque is not None
    assert Surroundings(lambda batch: batch).opaque is None
