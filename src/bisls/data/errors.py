"""What goes wrong with data."""

from __future__ import annotations


class DataError(RuntimeError):
    """A data set cannot be had or used; the message says why and what to do."""


class Unusable(Exception):
    """Why one file or one source is no good. Within this package only: the next source may do better."""
