"""Who takes part: pinned requirements, variants and grids, all in this one place."""

from __future__ import annotations

from collections.abc import Mapping
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
    # Its C files are for Python below 3.11: the option has them made anew by Cython (with a C compiler). It wants torchvision,
    # for pictures that nobody asks it for here: this old one bears any torch, since it does without its own compiled parts.
    "learn2learn": Environment(
        (
            (*TORCH, NUMPY, "scipy==1.17.1", "requests==2.34.2", "tqdm==4.70.1", "pillow==13.0.0", "gym==0.26.2"),
            ("--no-deps", "torchvision==0.15.2"),
            ("--no-deps", "--config-settings=--build-option=build_ext", "learn2learn==0.2.0"),
        ),
        "learn2learn",
    ),
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
    """One way to use a library. `base` is the setting that all share; without `grid` there is nothing to tune.

    Where two compute the same numbers, one is tuned and the other takes its rates: `tuned_as` is that peer and variant.
    """

    name: str
    base: Pair = (0.1, 0.2)
    grid: tuple[Pair, ...] = ()
    tuned_as: tuple[str, str] | None = None

    @property
    def pairs(self) -> list[Pair]:
        """All settings, the shared one first."""
        return list(dict.fromkeys((self.base, *self.grid)))


BOTH = tuple(product(UPPER, LOWER))
ABOVE = tuple((alpha, 0.2) for alpha in UPPER)
CEILED = tuple(product(UPPER, CEILINGS))
# with networks: rates that they can bear
LENET = tuple(product((1e-4, 3e-4, 1e-3, 3e-3), (0.003, 0.01, 0.03)))
MAML = tuple(product((1e-3, 3e-3, 1e-2), (0.1, 0.3, 1.0)))
MAML_ADAM = tuple(product((1e-3, 3e-3, 1e-2), (0.003, 0.01, 0.03)))
WEIGHT_NETWORK = tuple(product((1e-3, 3e-3, 1e-2), (0.001, 0.003, 0.01)))
SAMPLE_WEIGHTS = tuple(product((0.03, 0.1, 0.3), (0.001, 0.003, 0.01)))
BELOW = tuple((0.0, beta) for beta in (0.001, 0.003, 0.01))  # where nothing above has a rate


@dataclass(frozen=True)
class Peer:
    """A library, its worker and its variants on each kind of problem."""

    title: str
    worker: str
    environment: str
    contests: Mapping[str, tuple[Variant, ...]]
    ours: bool = False

    def variants(self, kind: str) -> tuple[Variant, ...]:
        """Those that take part in a kind of problem."""
        return self.contests.get(kind, ())


def tuned(name: str) -> Variant:
    return Variant(name, grid=BOTH)


def lenet(name: str) -> Variant:
    return Variant(name, base=(1e-3, 0.01), grid=LENET)


def maml(name: str, tuned_as: tuple[str, str] | None = None) -> Variant:
    return Variant(name, base=(3e-3, 0.3), grid=MAML, tuned_as=tuned_as)


SAME = ("torch", "MAML")  # what unrolls the same steps has the same hypergradient


def reweighting(name: str) -> dict[str, tuple[Variant, ...]]:
    grids = {"weight-network": ((3e-3, 0.003), WEIGHT_NETWORK), "sample-weights": ((0.1, 0.003), SAMPLE_WEIGHTS)}
    return {kind: (Variant(name, *grid),) for kind, grid in grids.items()}


def below(name: str) -> dict[str, tuple[Variant, ...]]:
    return dict.fromkeys(("weight-network", "sample-weights"), (Variant(name, (0.0, 0.001), BELOW),))


UNTUNED = Variant("BiSLS")
WITH_ADAMW = {kind: (UNTUNED, *rest) for kind, rest in below("BiSLS, AdamW below").items()}
PEERS = {
    "bisls": Peer(
        "bisls", "bisls_.py", "torch",
        {
            "penalties": (UNTUNED, Variant("BiSLS, same loops"), Variant("BiSLS.paper"), tuned("Alternating")),
            "representation": (UNTUNED, Variant("BiSLS.paper"), lenet("Alternating")),
            "few-shot": (UNTUNED, Variant("BiSLS, T not told"), maml("Alternating", SAME)),
            **WITH_ADAMW,
        },
        ours=True,
    ),
    "torch": Peer(
        "plain torch", "torch_.py", "torch",
        {"penalties": (tuned("CG"),), "few-shot": (maml("MAML"),), **below("plain training")},
    ),
    "hypertorch": Peer("hypertorch", "hypertorch_.py", "hypertorch", {"penalties": (tuned("CG"),)}),
    "torchopt": Peer(
        "TorchOpt", "torchopt_.py", "torchopt",
        {
            "penalties": (tuned("CG"), tuned("unrolled")),
            "representation": (lenet("CG"), lenet("unrolled")),
            "few-shot": (maml("MetaSGD", SAME), Variant("MetaAdam", (3e-3, 0.01), MAML_ADAM)),
            **reweighting("through one step"),
        },
    ),
    "betty": Peer(
        "Betty", "betty_.py", "betty",
        {
            "penalties": (tuned("CG"), tuned("Neumann"), tuned("finite differences")),
            "representation": (lenet("CG"), lenet("finite differences")),
            "few-shot": (maml("finite differences"),),
            **reweighting("finite differences"),
        },
    ),
    "boat": Peer("BOAT", "boat_.py", "boat", {"penalties": (tuned("CG"), tuned("unrolled"))}),
    "higher": Peer(
        "higher", "higher_.py", "higher",
        {
            "penalties": (tuned("unrolled"),),
            "few-shot": (maml("MAML", SAME),),
            **reweighting("through one plain step"),
        },
    ),
    "learn2learn": Peer("learn2learn", "learn2learn_.py", "learn2learn", {"few-shot": (maml("MAML", SAME),)}),
    "jaxopt": Peer(
        "jaxopt", "jaxopt_.py", "jaxopt",
        {
            "penalties": (
                tuned("gradient descent"),
                Variant("Armijo", (0.1, 1.0), CEILED),
                Variant("Polyak", (0.1, 1.0), CEILED),
                Variant("L-BFGS", grid=ABOVE),
            )
        },
    ),
    "optimistix": Peer("optimistix", "optimistix_.py", "optimistix", {"penalties": (Variant("BFGS", grid=ABOVE),)}),
}  # fmt: skip
