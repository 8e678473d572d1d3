"""Estimates of the hypergradient, the gradient of F(x) = f(x, y*(x)): one a file."""

from bisls.hypergrad.base import Hypergradient as Hypergradient
from bisls.hypergrad.base import HypergradientMethod as HypergradientMethod
from bisls.hypergrad.base import hypergradient as hypergradient
from bisls.hypergrad.implicit import Implicit as Implicit
from bisls.hypergrad.lookahead import Lookahead as Lookahead
from bisls.hypergrad.stochastic_neumann import StochasticNeumann as StochasticNeumann
from bisls.hypergrad.unrolled import Unrolled as Unrolled
