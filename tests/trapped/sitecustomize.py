"""A machine that advertises AMX and traps it, without one: every bfloat16 matrix product ends its process by SIGILL.

    PYTHONPATH=$PWD/tests/trapped make test

Python imports this file at its start, in every process of the run. As on such a machine, nothing dies where
`ONEDNN_MAX_CPU_ISA` was set when torch was imported. Only torch's own functions are trapped, not its kernels: a
product that is first met in a backward pass goes through.
"""

import functools
import os
import signal
import sys
from importlib.machinery import PathFinder

PRODUCTS = ("matmul", "mm", "addmm", "bmm", "baddbmm", "mv", "addmv")


class Trap:
    """A finder that hands out torch with its products trapped."""

    def find_spec(self, name, path=None, target=None):
        spec = PathFinder.find_spec(name, path, target) if name == "torch" else None
        if spec is not None:
            run = spec.loader.exec_module

            def exec_module(module):
                run(module)
                arm(module)

            spec.loader.exec_module = exec_module
        return spec


def arm(torch):
    """Wrap torch's products, unless its kernels are capped."""
    if os.environ.get("ONEDNN_MAX_CPU_ISA"):
        return

    def trapped(function):
        @functools.wraps(function)
        def call(*args, **kwargs):
            cast = torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") is torch.bfloat16
            if cast or any(getattr(one, "dtype", None) is torch.bfloat16 for one in args):
                os.kill(os.getpid(), signal.SIGILL)
            return function(*args, **kwargs)

        return call

    for name in PRODUCTS:
        setattr(torch, name, trapped(getattr(torch, name)))
        setattr(torch.Tensor, name, trapped(getattr(torch.Tensor, name)))
    torch.Tensor.__matmul__ = trapped(torch.Tensor.__matmul__)
    torch.nn.functional.linear = trapped(torch.nn.functional.linear)


if __name__ == "sitecustomize":  # not where pytest looks for examples in it
    sys.meta_path.insert(0, Trap())
