"""The only place that calls autograd: a loss called as it is, or played from its recorded operations, behind one interface."""

from bisls.evaluate.autograd import CalledLower as CalledLower
from bisls.evaluate.autograd import CalledUpper as CalledUpper
from bisls.evaluate.autograd import gradient as gradient
from bisls.evaluate.autograd import precision as precision
from bisls.evaluate.autograd import requiring_grad as requiring_grad
from bisls.evaluate.base import Evaluated as Evaluated
from bisls.evaluate.base import LowerLoss as LowerLoss
from bisls.evaluate.base import Outdated as Outdated
from bisls.evaluate.base import Products as Products
from bisls.evaluate.base import UpperLoss as UpperLoss
from bisls.evaluate.base import unit_vectors as unit_vectors
from bisls.evaluate.player import PlayedLower as PlayedLower
from bisls.evaluate.player import PlayedUpper as PlayedUpper
from bisls.evaluate.player import Players as Players
