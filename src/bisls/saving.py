"""Saving: when `fit` writes its checkpoint, and what becomes of a run whose disk refuses."""

from __future__ import annotations

import logging
from time import monotonic

from bisls.checkpoint import Checkpoint, Run

logger = logging.getLogger(__name__)


class Saving:
    """The checkpoints of one run. A disk that refuses one does not end the run, nor hide what did.

    Args:
        checkpoint: Where to and how often; None saves nothing.
        run: What is saved.
    """

    def __init__(self, checkpoint: Checkpoint | None, run: Run):
        self.checkpoint, self.run = checkpoint, run
        self.k = run.solver.k if len(run.history) else -1  # of the file; -1: there is none
        self.refused = 0  # checkpoints in a row that could not be written
        self._tried = monotonic()

    @property
    def due(self) -> bool:
        """Whether this iteration is one to save."""
        return self.checkpoint is not None and self.run.solver.k % self.checkpoint.every == 0

    @property
    def late(self) -> bool:
        """Whether the last checkpoint is too old; a matter of clocks, so the ranks must agree on it."""
        seconds = self.checkpoint.seconds if self.checkpoint else None
        return seconds is not None and monotonic() - self._tried >= seconds

    def save(self, only_new: bool = False) -> None:
        """Write the checkpoint, or say that it could not be written and go on.

        Args:
            only_new: Not where the file is of this iteration.
        """
        k, history = self.run.solver.k, self.run.history
        if self.checkpoint is None or (only_new and self.k == k):
            return
        try:
            self.checkpoint.save(self.run)
        except OSError as error:
            history.unsaved = str(error)
            self.refused += 1
            if self.refused == 1:
                logger.warning("k = %d: %s; the run goes on, and tries again", k, error)
            return
        finally:
            self._tried = monotonic()
        if self.refused:
            logger.warning("k = %d: the checkpoint is written again, after %d that could not be", k, self.refused)
        self.k, self.refused, history.unsaved = k, 0, ""

    def end(self) -> None:
        """Say so, where a run ends unsaved."""
        if self.refused:
            kept = f"the file is of k = {self.k}" if self.k >= 0 else "there is none"
            logger.error("the run ends at k = %d unsaved: %s; %s", self.run.solver.k, self.run.history.unsaved, kept)

    @property
    def remedy(self) -> str:
        """How a run that is interrupted goes on, for its message."""
        if self.checkpoint is None:
            return ""
        unsaved = f"; {self.run.history.unsaved}" if self.refused else ""
        if self.k < 0:
            return unsaved
        behind = f" from k = {self.k}" if self.refused else ""
        return f"{unsaved}; go on{behind} with fit(..., checkpoint={str(self.checkpoint.path)!r}, resume=True)"
