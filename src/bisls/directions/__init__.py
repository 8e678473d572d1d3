"""Which way to go: one direction a file. The step rules decide how far."""

from bisls.directions.adam import Adam as Adam
from bisls.directions.base import Direction as Direction
from bisls.directions.base import Heading as Heading
from bisls.directions.denoised import Denoised as Denoised
from bisls.directions.lbfgs import LBFGS as LBFGS
from bisls.directions.steepest import Steepest as Steepest
