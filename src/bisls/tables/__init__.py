"""Behind `bisls fit` and `bisls predict`: a table as a file, made into numbers, fitted, and told of on one page."""

from bisls.tables.fitting import run_fit as run_fit
from bisls.tables.predicting import run_predict as run_predict
from bisls.tables.reading import TableError as TableError
