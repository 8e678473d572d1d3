"""Ready problems, each with its data, the exact value of what it minimises, and measures of what came out."""

from bisls.tasks.adversarial import adversarial as adversarial
from bisls.tasks.architecture import architecture as architecture
from bisls.tasks.base import Batches as Batches
from bisls.tasks.base import Data as Data
from bisls.tasks.base import Drawn as Drawn
from bisls.tasks.base import Task as Task
from bisls.tasks.cleaning import cleaning as cleaning
from bisls.tasks.decays import decays as decays
from bisls.tasks.denoising import denoising as denoising
from bisls.tasks.distillation import distillation as distillation
from bisls.tasks.few_shot import Pictures as Pictures
from bisls.tasks.few_shot import Sinusoids as Sinusoids
from bisls.tasks.few_shot import Source as Source
from bisls.tasks.few_shot import few_shot as few_shot
from bisls.tasks.hyper_representation import CrossEntropy as CrossEntropy
from bisls.tasks.hyper_representation import HeadLoss as HeadLoss
from bisls.tasks.hyper_representation import LeastSquares as LeastSquares
from bisls.tasks.hyper_representation import hyper_representation as hyper_representation
from bisls.tasks.mixture import mixture as mixture
from bisls.tasks.penalties import logistic_penalties as logistic_penalties
from bisls.tasks.penalties import ridge_penalties as ridge_penalties
from bisls.tasks.quadratic import quadratic as quadratic
from bisls.tasks.sample_weights import sample_weights as sample_weights
from bisls.tasks.weight_network import weight_network as weight_network
