"""The data of one outer iteration: what was given, settled by its numbers; and the previous upper batch, which may judge."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from bisls._check import require_argument
from bisls.batches import Minibatches, Sample, kept, leaves, restored, same
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
    judged, lower.several, more.several = on_any_rank(judged, lower.several, more.several)
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
