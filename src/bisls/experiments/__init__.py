"""The experiments of the paper: one module for each figure in `figures`, and what runs them."""

from importlib import import_module

from bisls.experiments.backends import BACKENDS as BACKENDS
from bisls.experiments.backends import SweepError as SweepError
from bisls.experiments.base import SCALES as SCALES
from bisls.experiments.base import SEEDS as SEEDS
from bisls.experiments.base import Figure as Figure
from bisls.experiments.base import Plan as Plan
from bisls.experiments.readings import READINGS as READINGS
from bisls.experiments.store import Store as Store
from bisls.experiments.sweep import reproduce as reproduce

NAMES = (
    "calibration",
    "demo_1",
    "quadratics",
    "trajectories",
    "demo_2",
    "app_single_level",
    "demo_3",
    "mnist_sps",
    "demo_4",
    "hyper_more",
    "search_and_runtime",
    "search_cost",
    "opt",
    "eta",
    "search_cost_beta",
    "delta_opt1",
    "delta_opt3",
    "datadist",
    "mnist50",
    "sample_hyper",
    "mnist_sample",
    "rates",
)


def figure(name: str) -> Figure:
    """The figure of this name."""
    return import_module(f"bisls.experiments.figures.{name}").FIGURE
