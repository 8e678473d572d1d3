"""What y does when x moves along the upper ray: one response a file."""

from bisls.response.base import Ray as Ray
from bisls.response.base import Response as Response
from bisls.response.base import Scene as Scene
from bisls.response.frozen import Frozen as Frozen
from bisls.response.gradient_steps import GradientSteps as GradientSteps
from bisls.response.rerun import Rerun as Rerun
from bisls.response.resampled import Resampled as Resampled
from bisls.response.tangent import Tangent as Tangent
