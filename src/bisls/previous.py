"""The previous upper batch, which judges the next step where no other does: kept, compared, saved."""

from __future__ import annotations

import logging
from typing import Any

from bisls.batches import kept, restored, same, tensors
from bisls.states import Batch

logger = logging.getLogger(__name__)


class Previous:
    """The upper batch of the last iteration, as it was then.

    The batch itself is kept and not a copy: a loader that hands over new tensors costs nothing. One that writes the next batch
    into the same tensors has overwritten it, which their versions tell: then nobody judges, and the log says so once.
    """

    def __init__(self) -> None:
        self._batch: Any = None
        self._saved: Any = None  # as a state had it: its shape is that of the next upper batch
        self._versions: list[int | None] = []
        self._said = False

    def keep(self, batch: Any) -> None:
        """This one judges next; None: none does."""
        self._batch, self._saved, self._versions = batch, None, _versions(batch)

    def judge(self, upper: Any, call: str) -> Any:
        """The batch that can judge a step on ``upper``: None where there is none, or where it holds the same numbers.

        Args:
            upper: The present upper batch.
            call: Who asks, for the log.
        """
        if self._saved is not None:
            found = restored(self._saved, upper)
        elif self._overwritten:
            found = None
            if not self._said:
                logger.warning(
                    "`%s(upper_batch=...)`: the previous upper batch was changed in place since its step, so it cannot judge "
                    "this one; pass tensors that stay as they are (clone() what is written into again), or a step_batch",
                    call,
                )
            self._said = True
        else:
            found = self._batch
        return None if found is None or same(found, upper) else found

    def packed(self) -> Any:
        """What a state holds of it."""
        batch = self._saved
        if batch is None and not self._overwritten:
            batch = kept(self._batch)
            if batch is None and self._batch is not None:
                logger.warning(
                    "the last upper batch is a %s and can't be saved; the first step after loading is judged on its own batch",
                    type(self._batch).__name__,
                )
        return Batch.packed(batch)

    def load(self, saved: Any) -> None:
        """Go on from what `packed` gave, as `Batch` reads it."""
        self.keep(None)
        self._saved = saved

    @property
    def _overwritten(self) -> bool:
        return _versions(self._batch) != self._versions


def _versions(batch: Any) -> list[int | None]:
    """How often each tensor of a batch was written; None for those that do not count it (made in inference mode)."""
    return [None if tensor.is_inference() else tensor._version for tensor in tensors(batch)]
