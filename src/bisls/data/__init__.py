"""Data sets: found, or downloaded into a cache, and never used unless their checksum is right."""

from bisls.data.catalogue import fetch as fetch
from bisls.data.catalogue import load as load
from bisls.data.catalogue import where as where
from bisls.data.errors import DataError as DataError
from bisls.data.formats import Drawings as Drawings
from bisls.data.formats import Images as Images
from bisls.data.formats import Table as Table
from bisls.data.sources import DATASETS as DATASETS
