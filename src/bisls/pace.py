"""How long the steps of a run are, from what it measures: numbers alone, the rule of `optim.Auto`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from math import exp, sqrt
from typing import Any, ClassVar

from bisls.states import Fields, Number, Whole

# Settled on the problems that docs/decisions.md names, judged on others.
START = 0.3  # the first step, in units of the one that is best for the first batch alone
B2 = 0.999  # how long squared gradients are remembered
SHARE = 0.2  # of the way from the average to the iterate, where gradients are taken
WORSE = 0.1  # how much worse than at the average the loss may be there, as a share of what batches differ by
REACH = 1.6  # the step that noise allows, in units of distance / sqrt(sum of squared gradients)
OUTLIER = 10.0  # a squared gradient counts for at most so many times the mean of those before
OPENING, FIRST, OFTEN = (1, 2, 4, 8), 30.0, 2  # after so many steps they are forgotten, at most so often, if their mean
# square is so many times that of the next
GAIN, MOST, LEAST, FASTER, SLOWER = 0.3, 0.5, 0.03, 1.3, 0.6  # how fast the ceiling learns: at first, bounds, factors
AHEAD = 4.0  # the ceiling is at most so many times the step that was taken
SPARSE, DENSE = 12, 6  # the average is looked at every 1 + k / DENSE steps, and at least every so many
FORGET = 0.1  # the weight of a new loss in the running mean
ABOVE, CLEARLY = (
    30,
    3.0,
)  # so many losses in a row above the first one, and their mean by so many times their spread: lost
CALM, CALMEST = 0.1, 0.1  # how fast another loss calms the steps, and how much at most
CALMER, LEAST_LIMIT = 0.3, 0.03  # and by what factor each time that it has risen for long, and how much at most
DEAD = 10  # so many gradients in a row that are exactly zero, and next to nothing gained: lost as well
AGAIN = 0.1  # the step to begin anew with, in units of that of the last time


@dataclass(frozen=True)
class Ceiling:
    """The longest step that the last looks at the average allow, and how fast it changes.

    Each look is a vote, longer or shorter. Votes that agree speed it up, votes that differ slow it down.

    Attributes:
        size: The ceiling.
        gain: By what its logarithm changed last.
        vote: 1 for longer, -1 for shorter, 0 before the first.
    """

    size: float
    gain: float
    vote: int

    def voted(self, longer: bool) -> Ceiling:
        """The ceiling after one more vote."""
        vote = 1 if longer else -1
        factor = 1.0 if self.vote == 0 else FASTER if vote == self.vote else SLOWER
        gain = min(max(self.gain * factor, LEAST), MOST)
        return Ceiling(self.size * exp(vote * gain), gain, vote)


def next_look(k: int) -> int:
    """The step at which the average is looked at after a look at step k."""
    return max(k + min(1 + k // DENSE, SPARSE), 3)


def differing(spread: float, loss: float, last: float, weight: float) -> float:
    """The running mean of what one loss differs from the next: what falls steadily is no noise, one outlier is not all of it."""
    change = sqrt(0.5) * abs(loss - last)
    return spread + weight * (min(change, OUTLIER * spread or change) - spread)


@dataclass(frozen=True)
class Pace:
    """The steps of a run so far, as numbers.

    Attributes:
        k: Steps taken.
        ceiling: The longest step that the looks at the average allow; 0 before the first step.
        gain: By what its logarithm changed last.
        vote: 1 for longer, -1 for shorter, 0 before the first.
        look: The step at which the average is looked at next.
        lengths: The sum of squared gradient norms, outliers tamed.
        squares: The sum of them in the metric of the scaling.
        distance: How far the average has been from the start, in that metric.
        weights: The sum of the weights of the average.
        first_step: Where the ceiling began, at the start of the run: what was forgotten since does not count.
        first_loss: The loss at the first step.
        mean_loss: The running mean of the losses.
        last_loss: The last one.
        spread: What one loss differs from the next, in the running mean.
        above: How many losses in a row were above the first.
        calm: What the steps are multiplied with, at most 1: less where another loss would fall with shorter ones.
        limit: The same, after the other loss has risen for long.
        forgot: How often the first gradients were forgotten.
        dead: How many gradients in a row were exactly zero.
    """

    KIND: ClassVar[Fields] = Fields(
        {
            "k": Whole(),
            "ceiling": Number(0.0),
            "gain": Number(0.0),
            "vote": Whole(-1, 1),
            "look": Whole(),
            "lengths": Number(0.0),
            "squares": Number(0.0),
            "distance": Number(0.0),
            "weights": Number(0.0),
            "first_step": Number(0.0),
            "first_loss": Number(),
            "mean_loss": Number(),
            "last_loss": Number(),
            "spread": Number(0.0),
            "above": Whole(),
            "calm": Number(0.0, 1.0),
            "limit": Number(0.0, 1.0),
            "forgot": Whole(),
            "dead": Whole(),
        }
    )

    k: int = 0
    ceiling: float = 0.0
    gain: float = GAIN
    vote: int = 0
    look: int = 3
    lengths: float = 0.0
    squares: float = 0.0
    distance: float = 0.0
    weights: float = 0.0
    first_step: float = 0.0
    first_loss: float = 0.0
    mean_loss: float = 0.0
    last_loss: float = 0.0
    spread: float = 0.0
    above: int = 0
    calm: float = 1.0
    limit: float = 1.0
    forgot: int = 0
    dead: int = 0

    @property
    def due(self) -> bool:
        """Whether the average is to be looked at in this step."""
        return self.ceiling > 0 and self.k + 1 >= self.look

    def voted(self, here: float, at_average: float, worse: float = WORSE) -> Pace:
        """After a look: the loss between average and iterate, and at the average, on the same batch.

        Where the one is higher by more than ``worse`` times what batches differ by, steps are to be shorter.
        """
        after = Ceiling(self.ceiling, self.gain, self.vote).voted(here - at_average <= worse * self.spread)
        return replace(self, ceiling=after.size, gain=after.gain, vote=after.vote, look=next_look(self.k + 1))

    def usual(self, length: float) -> float:
        """The squared gradient norm as it counts, and moves: one batch can't end the run."""
        return min(length, OUTLIER * self.lengths / self.k) if self.k > 0 and self.lengths > 0 else length

    def outlying(self, length: float) -> bool:
        """Whether the first gradients were so much longer than this one that all that was learnt of them is of no use."""
        return self.forgot < OFTEN and self.k in OPENING and self.lengths > FIRST * self.k * length > 0.0

    def forgotten(self) -> Pace:
        """A run that begins again because of them."""
        return Pace(forgot=self.forgot + 1, first_step=self.first_step)

    def begun(self, step: float) -> Pace:
        """With the step that is best for the first batch along its own direction."""
        first = self.first_step if self.forgot else START * step
        return replace(self, ceiling=START * step, first_step=first, squares=0.0, distance=0.0)

    def stepped(self, square: float, usual: float) -> tuple[float, float, Pace]:
        """One step along a direction with ``<g, d> = square``: its size, the weight of its end, and what follows."""
        squares = self.squares + square
        away = self.distance or self.ceiling * sqrt(square)
        free = min(self.ceiling, REACH * away / sqrt(squares)) if squares > 0.0 else 0.0
        size = self.calm * self.limit * free
        k = self.k + 1
        weight = k * size * size
        weights = self.weights + weight
        later = replace(
            self,
            k=k,
            ceiling=min(self.ceiling, AHEAD * free),
            squares=squares,
            lengths=self.lengths + usual,
            weights=weights,
        )
        return size, weight / weights if weights > 0 else 1.0, later

    def noted(self, loss: float) -> Pace:
        """With the loss of a step that was taken."""
        if self.k <= 1:
            return replace(self, first_loss=loss, mean_loss=loss, last_loss=loss, spread=0.0, above=0)
        weight = max(FORGET, 1.0 / self.k)
        mean = self.mean_loss + weight * (loss - self.mean_loss)
        spread = differing(self.spread, loss, self.last_loss, weight)
        above = self.above + 1 if loss > self.first_loss else 0
        return replace(self, mean_loss=mean, last_loss=loss, spread=spread, dead=0, above=above)

    def taught(self, slope: float) -> Pace:
        """With the derivative of another loss by the logarithm of the steps: where it would fall with shorter ones, they are."""
        calm = self.calm * exp(-CALM if slope > 0 else CALM if slope < 0 else 0.0)
        return replace(self, calm=min(max(calm, CALMEST), 1.0))

    def calmed(self) -> Pace:
        """With shorter steps, from now on."""
        return replace(self, limit=max(CALMER * self.limit, LEAST_LIMIT))

    @property
    def gone(self) -> bool:
        """Whether gradients are zero, and nothing is gained."""
        return self.dead >= DEAD and self.mean_loss > self.first_loss - 0.1 * abs(self.first_loss)

    @property
    def lost(self) -> bool:
        """Whether the losses have been above the first one for long, and clearly; or gradients are zero, and nothing gained."""
        return self.gone or (self.above >= ABOVE and self.mean_loss > self.first_loss + CLEARLY * self.spread)

    def died(self, loss: float) -> Pace:
        """After a gradient that was exactly zero, with the loss there."""
        return replace(self.noted(loss), dead=self.dead + 1) if self.k > 0 else self

    def anew(self) -> Pace:
        """From the start, with a shorter step."""
        again = AGAIN * self.first_step
        return Pace(ceiling=again, first_step=again)

    def packed(self) -> dict[str, Any]:
        """Plain numbers, for a checkpoint."""
        return asdict(self)

    @classmethod
    def unpacked(cls, state: Mapping[str, Any]) -> Pace:
        """What `packed` gave."""
        return cls(**state)
