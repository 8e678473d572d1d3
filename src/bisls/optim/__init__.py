"""The same step rules as torch optimisers: drop-in, with one ceiling or none to set."""

from bisls.optim.auto import Auto as Auto
from bisls.optim.base import LineOptimizer as LineOptimizer
from bisls.optim.sls import SLS as SLS
from bisls.optim.sls import SLSB as SLSB
from bisls.optim.sps import SPSB as SPSB
from bisls.optim.sps import DecSPS as DecSPS
from bisls.optim.sps import SPSMax as SPSMax
