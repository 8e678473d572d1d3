"""Solve H z = b, where H is known only by its products: one solver a file."""

from bisls.linear.base import LinearSolver as LinearSolver
from bisls.linear.base import Solution as Solution
from bisls.linear.cg import CG as CG
from bisls.linear.dense import Dense as Dense
from bisls.linear.direct import Direct as Direct
from bisls.linear.identity import Identity as Identity
from bisls.linear.neumann import Neumann as Neumann
