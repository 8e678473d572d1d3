"""Estimators for tables: penalties by group of columns, tuned by cross-validation, with scikit-learn's habits.

torch is not imported, unless a table has so many columns that ``solver="auto"`` takes "bisls".
"""

try:
    import sklearn as _needed  # noqa: F401
except ModuleNotFoundError as error:
    raise ImportError("bisls.sklearn needs scikit-learn: pip install 'bisls[sklearn]'") from error

from bisls.sklearn.logistic import GroupLogisticRegressionCV as GroupLogisticRegressionCV
from bisls.sklearn.ridge import GroupRidgeCV as GroupRidgeCV
from bisls.sklearn.sparse import WeightedElasticNetCV as WeightedElasticNetCV
from bisls.sklearn.sparse import WeightedLassoCV as WeightedLassoCV
