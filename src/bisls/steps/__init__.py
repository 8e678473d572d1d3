"""How far to go along a ray: one family of step rules a file."""

from bisls.steps.armijo import Armijo as Armijo
from bisls.steps.armijo import Backtrack as Backtrack
from bisls.steps.armijo import Grow as Grow
from bisls.steps.armijo import Interpolate as Interpolate
from bisls.steps.armijo import Keep as Keep
from bisls.steps.armijo import Restart as Restart
from bisls.steps.base import Memory as Memory
from bisls.steps.base import Step as Step
from bisls.steps.base import StepRule as StepRule
from bisls.steps.constant import Constant as Constant
from bisls.steps.curvature import Curvature as Curvature
from bisls.steps.decay import Decay as Decay
from bisls.steps.envelope import Envelope as Envelope
from bisls.steps.polyak import DecreasingPolyak as DecreasingPolyak
from bisls.steps.polyak import Polyak as Polyak
