"""Estimators for tables: penalties by group of columns, tuned by cross-validation, with scikit-learn's habits.

torch is not imported, unless a table has so many columns that ``solver="auto"`` takes "bisls".
"""

from bisls.sklearn.logistic import GroupLogisticRegressionCV as GroupLogisticRegressionCV
from bisls.sklearn.ridge import GroupRidgeCV as GroupRidgeCV
from bisls.sklearn.sparse import WeightedElasticNetCV as WeightedElasticNetCV
from bisls.sklearn.sparse import WeightedLassoCV as WeightedLassoCV
