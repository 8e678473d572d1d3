"""Who takes part: pinned requirements, variants and grids, all in this one place."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from pathlib import Path

ROOT = Path(__file__).parents[2]
WORKERS = ROOT / "benchmarks" / "peers"
NUMPY = "numpy==2.4.6"
TORCH = ("--constraint", str(ROOT / "constraints.txt"), "torch")
JAX = ("jax==0.10.2", "jaxlib==0.10.2", "optax==0.2.8", "scipy==1.17.1", NUMPY)


@dataclass(frozen=True)
class Environment:
    """What pip installs, one call after another, and what must be importable then."""

    installs: tuple[tuple[str, ...], ...]
    imports: str


ENVIRONMENTS = {
    "torch": Environment(((*TORCH, NUMPY),), "torch, numpy"),
    "torchopt": Environment(((*TORCH, NUMPY, "torchopt==0.7.3"),), "torchopt"),
    # it asks for Python below 3.11 and works above; so its two requirements are installed first, and it alone after that
    "betty": Environment(
        ((*TORCH, NUMPY), ("--no-deps", "--ignore-requires-python", "betty-ml==0.2.1")), "betty.engine, betty.problems"
    ),
    "boat": Environment(((*TORCH, "numpy==1.26.4", "boat-torch==1.1.1"),), "boat_torch"),
    "higher": Environment(((*TORCH, NUMPY, "higher==0.2.1"),), "higher"),
    # not on PyPI: the package of this name there is another one
    "hypertorch": Environment(
        (
            (
                "--no-deps",
                "https://github.com/prolearner/hypertorch/archive/0771f5c32cf0f47791f17571cc1e78ec465723e0.zip",
            ),
            (*TORCH, NUMPY),
        ),
        "hypergrad",
    ),
    "jaxopt": Environment(((*JAX, "jaxopt==0.8.5"),), "jaxopt, optax"),
    "optimistix": Environment(((*JAX, "optimistix==0.1.0", "equinox==0.13.8", "lineax==0.1.1"),), "optimistix, optax"),
}

Pair = tuple[float, float]
UPPER = (0.01, 0.1, 1.0)
LOWER = (0.02, 0.2, 2.0)
CEILINGS = (1.0, 10.0, 100.0)  # below, where the solver searches its step and the number is only a ceiling


@dataclass(frozen=True)
class Variant:
    """One way to use a library. `base` is the setting that all share; without `grid` there is nothing to tune."""

    name: str
    base: Pair = (0.1, 0.2)
    grid: tuple[Pair, ...] = ()

    @property
    def pairs(self) -> list[Pair]:
        """All settings, the shared one first."""
        return list(dict.fromkeys((self.base, *self.grid)))


BOTH = tuple(product(UPPER, LOWER))
ABOVE = tuple((alpha, 0.2) for alpha in UPPER)
CEILED = tuple(product(UPPER, CEILINGS))
# hyper-representation: rates that a LeNet can bear
LENET = tuple(product((1e-4, 3e-4, 1e-3, 3e-3), (0.003, 0.01, 0.03)))


@dataclass(frozen=True)
class Peer:
    """A library, its worker and its variants on each kind of problem."""

    title: str
    worker: str
    environment: str
    penalties: tuple[Variant, ...] = ()
    representation: tuple[Variant, ...] = ()
    ours: bool = False

    def variants(self, kind: str) -> tuple[Variant, ...]:
        """Those that take part in a kind of problem."""
        return self.penalties if kind == "penalties" else self.representation


def tuned(name: str) -> Variant:
    return Variant(name, grid=BOTH)


def lenet(name: str) -> Variant:
    return Variant(f"representation {name}", base=(1e-3, 0.01), grid=LENET)


PEERS = {
    "bisls": Peer(
        "bisls", "bisls_.py", "torch",
        (Variant("BiSLS"), Variant("BiSLS, same loops"), Variant("BiSLS.paper"), tuned("Alternating")),
        (Variant("representation BiSLS"), Variant("representation BiSLS.paper"), lenet("Alternating")),
        ours=True,
    ),
    "torch": Peer("plain torch", "torch_aid.py", "torch", (tuned("CG"),)),
    "hypertorch": Peer("hypertorch", "hypertorch_.py", "hypertorch", (tuned("CG"),)),
    "torchopt": Peer(
        "TorchOpt", "torchopt_.py", "torchopt", (tuned("CG"), tuned("unrolled")), (lenet("CG"), lenet("unrolled"))
    ),
    "betty": Peer(
        "Betty", "betty_.py", "betty", (tuned("CG"), tuned("Neumann"), tuned("finite differences")),
        (lenet("CG"), lenet("finite differences")),
    ),
    "boat": Peer("BOAT", "boat_.py", "boat", (tuned("CG"), tuned("unrolled"))),
    "higher": Peer("higher", "higher_.py", "higher", (tuned("unrolled"),)),
    "jaxopt": Peer(
        "jaxopt", "jaxopt_.py", "jaxopt",
        (
            tuned("gradient descent"),
            Variant("Armijo", (0.1, 1.0), CEILED),
            Variant("Polyak", (0.1, 1.0), CEILED),
            Variant("L-BFGS", grid=ABOVE),
        ),
    ),
    "optimistix": Peer("optimistix", "optimistix_.py", "optimistix", (Variant("BFGS", grid=ABOVE),)),
}  # fmt: skip
