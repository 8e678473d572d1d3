"""Shared set-up: a machine that is asked first, one thread (results do not depend on it), modules importable, a browser."""

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))  # what attacks and tests share

from machine import settle

# Before torch is imported, since it looks at its environment once. What is set here reaches the processes that tests
# start, and the workers of pytest-xdist, which therefore need not ask again. To try it: tests/trapped.
SAID = "" if "PYTEST_XDIST_WORKER" in os.environ else settle(os.environ)
os.environ.setdefault("OMP_NUM_THREADS", "1")  # the processes that tests start

import torch  # noqa: E402

torch.set_num_threads(1)


def pytest_report_header():
    """What was done about this machine."""
    return SAID or None


def pytest_collection_modifyitems(items):
    """Files with slow tests first: side by side, nobody then waits for one that began last."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)  # stable: otherwise the order is as it was


@pytest.fixture(scope="session")
def browser():
    """Chromium, see `browser.Browser`; tests that ask for it are skipped where there is none."""
    from browser import chromium

    with chromium() as one:
        yield one
