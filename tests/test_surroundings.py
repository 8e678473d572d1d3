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
