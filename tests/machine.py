"""Whether this machine runs what its CPU promises: asked in a child process, before the tests import torch.

Some hypervisors advertise AMX and trap it. There torch dies with SIGILL in any bfloat16 matrix product, and a run of
the tests with it. `ONEDNN_MAX_CPU_ISA` keeps torch's kernels from it; it is read once, so it must be set early.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import MutableMapping, Sequence

VARIABLE, CAP = "ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16"
PRODUCT = "import torch; a = torch.ones(64, 64, dtype=torch.bfloat16); a @ a"
PROBE = (sys.executable, "-c", PRODUCT)


def settle(environment: MutableMapping[str, str], probe: Sequence[str] = PROBE) -> str:
    """Cap what torch's kernels use if the probe is killed; what there is to say about it.

    Args:
        environment: Where the variable goes. One that is set already is the user's, and is left alone.
        probe: A command; only its death by a signal counts, so an error (no torch, say) changes nothing.

    Returns:
        A line for the header of the run, empty where nothing was changed.
    """
    if VARIABLE in environment:
        return ""
    done = subprocess.run(probe, env=dict(environment), capture_output=True, check=False)
    if done.returncode >= 0:
        return ""
    environment[VARIABLE] = CAP
    end = signal.Signals(-done.returncode).name
    return f"machine: a bfloat16 product dies here ({end}), so {VARIABLE}={CAP} for this run"
