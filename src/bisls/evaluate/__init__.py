"""The only room that calls autograd: values, gradients and products of second derivatives of a problem's losses."""

from bisls.evaluate.graph import Graph as Graph
from bisls.evaluate.graph import unit_vectors as unit_vectors
from bisls.evaluate.lean import Lean as Lean
from bisls.evaluate.losses import gradient as gradient
from bisls.evaluate.losses import lower_point as lower_point
from bisls.evaluate.losses import precision as precision
from bisls.evaluate.losses import requiring_grad as requiring_grad
from bisls.evaluate.losses import started as started
from bisls.evaluate.losses import upper_point as upper_point
from bisls.evaluate.losses import value as value
