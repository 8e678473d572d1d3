"""The data of one outer iteration: what was given, settled by its numbers; and the previous upper batch, which may judge."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from bisls._check import require_argument
from bisls.batches import Minibatches, Sample, fingerprint, kept, leaves, restored, same
from bisls.ranks import on_any_rank
from bisls.response.base import Response
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
        self.steady = Steady()

    def keep(self, batch: Any, sample: Sample | None = None) -> None:
        """This one judges next; None: none does. The sample is that of the iteration."""
        self._batch, self._saved, self._versions = batch, None, _versions(batch)
        self.steady.keep(sample)

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

    def load(self, saved: Any, steady: int) -> None:
        """Go on from what `packed` gave, as `Batch` reads it, and from a `Steady.mark`."""
        self.keep(None)
        self._saved = saved
        self.steady.load(steady)

    @property
    def _overwritten(self) -> bool:
        return _versions(self._batch) != self._versions


class Steady:
    """The batches of the last iteration, to tell whether those of the next are the same: without noise they are, for ever."""

    def __init__(self) -> None:
        self._batches: Any = None
        self._versions: list[int | None] = []
        # the fingerprint of both; None: nobody has asked; 0: there are none, or none that has one
        self._mark: int | None = 0

    def keep(self, sample: Sample | None) -> None:
        """These are the last ones now; None: there are none."""
        if sample is None or sample.lower.several:
            self._batches, self._versions, self._mark = None, [], 0
            return
        now = (sample.upper, sample.lower.newest)
        there, versions = self._batches is not None, _versions(now)
        if not (there and now[0] is self._batches[0] and now[1] is self._batches[1] and versions == self._versions):
            self._mark = None
        self._batches, self._versions = now, versions

    def again(self, upper: Any, lower: Minibatches) -> bool:
        """Whether these hold the same numbers. A run that goes on from a file answers as one that never stopped."""
        now = (upper, lower.newest)
        if lower.several or (self._batches is None and not self._mark):
            return False
        if self._batches is None:
            return _mark(now) == self._mark
        return _versions(self._batches) == self._versions and same(self._batches, now) and self.mark != 0

    @property
    def mark(self) -> int:
        """What a state holds of them."""
        if self._mark is None:
            unchanged = _versions(self._batches) == self._versions
            self._mark = _mark(self._batches) if unchanged else 0
        return self._mark

    def load(self, mark: int) -> None:
        """Go on from a `mark`."""
        self._batches, self._versions, self._mark = None, [], mark


def _mark(batches: Any) -> int:
    """What tells batches apart in a file; 0 for those that hold other things than numbers and text."""
    plain = (Tensor, np.ndarray, int, float, str, type(None))
    return fingerprint(batches) if all(isinstance(leaf, plain) for leaf in leaves(batches)) else 0


def sample_of(
    call: str, upper: Any, lower: Minibatches, judge: Any, extra: Sequence[Any], previous: Previous, response: Response
) -> Sample:
    """The batches of an iteration, and who judges: settled here, by their numbers, once for all ranks.

    Args:
        call: Who asks, for messages.
        upper: The upper batch.
        lower: One batch for each lower step.
        judge: An upper batch that judges the step, or None: then the previous one does.
        extra: Lower batches that no lower step sees.
        previous: The upper batch of the last iteration.
        response: Says whether a judge is of use.
    """
    if judge is not None and not response.two_samples:
        rule = f"must be None here: {response!r} looks at one sample; Tangent() and BiSPS(samples=2) look at two"
        require_argument(call, "step_batch", judge, False, rule)
    if judge is None:
        judge = previous.judge(upper, call)
    elif same(judge, upper):
        judge = None
    more = Minibatches([*lower, *extra], lower.several or any(not same(lower[0], other) for other in extra))
    judged = response.two_samples and judge is not None
    changed = judged or not previous.steady.again(upper, lower)
    judged, lower.several, more.several, changed = on_any_rank(judged, lower.several, more.several, changed)
    lower.steady = not (changed or lower.several)
    return Sample(upper, lower, judge, judged, more)


def minibatches(call: str, lower: Any, iters: int, any_number: bool) -> Minibatches:
    """The lower batches that a user passed: a list has one for each step, anything else is one for all.

    A list that holds the same numbers again and again is one batch for all as well.

    Args:
        call: Who asks, for messages.
        lower: What was passed.
        iters: Lower steps.
        any_number: Whether a list may have another length, which is then how many steps there are.
    """
    if not isinstance(lower, list):
        return Minibatches.repeated(lower, iters)
    if not lower or (len(lower) != iters and not any_number):
        raise ValueError(
            f"`{call}(lower_batches=[...])`: a list needs one batch for each of the lower_iters = {iters} lower steps, got "
            f"{len(lower)}; pass a tuple or a tensor for one batch for all"
        )
    return Minibatches(lower, several=any(not same(lower[0], other) for other in lower[1:]))


def _versions(batch: Any) -> list[int | None]:
    """How often each tensor of a batch was written; None for those that do not count it (made in inference mode)."""
    tensors = [leaf for leaf in leaves(batch) if isinstance(leaf, Tensor)]
    return [None if tensor.is_inference() else tensor._version for tensor in tensors]
