"""Shared set-up: one thread (results do not depend on the machine), the tests' own modules importable, a browser."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def browser():
    """Chromium, see `browser.Browser`; tests that ask for it are skipped where there is none."""
    from browser import chromium

    with chromium() as one:
        yield one
