"""How y is trained: one way a file. All hand over where they went, so that a hypergradient can look through their steps."""

from bisls.lower.base import Began as Began
from bisls.lower.base import Effect as Effect
from bisls.lower.base import Ended as Ended
from bisls.lower.base import Lowered as Lowered
from bisls.lower.base import LowerPart as LowerPart
from bisls.lower.base import TraceStep as TraceStep
from bisls.lower.base import told as told
from bisls.lower.begun import Begun as Begun
from bisls.lower.begun import Held as Held
from bisls.lower.coordinate import CoordinateDescent as CoordinateDescent
from bisls.lower.first import begin as begin
from bisls.lower.loop import Loop as Loop
from bisls.lower.newton import Newton as Newton
from bisls.lower.optimizer import UserOptimizer as UserOptimizer
from bisls.lower.solved import Solved as Solved
from bisls.lower.trained import Trained as Trained
