"""What a run believes of a batch before it learns it, asked for where the curve has a point."""

from __future__ import annotations

from collections.abc import Iterator

from kalmanhead.batch import Batch
from kalmanhead.cli.curve import is_drawn
from kalmanhead.engine import Progress
from kalmanhead.learner import OnlineLearner

# Targets of a batch that are looked at; more say little more, and the pass is not free.
MOST_TARGETS = 2**12
# Early on every batch is a point of the curve; so many of them are looked at.
EVERY = 32


def foreseen(
    batches: Iterator[Batch], learner: OnlineLearner, progress: Progress
) -> Iterator[Batch]:
    """Pass batches on to the loop; some are first held against what the learner says of them.

    The loop asks for a batch once it has learnt the one before, so that nothing has been learnt
    yet from the batch that is looked at.
    """
    try:
        for batch in batches:
            next_batch = progress.batches + 1
            if is_drawn(next_batch) and next_batch % EVERY == 0 and len(batch):
                look(batch, learner, progress)
            yield batch
    finally:
        # Ends a reading thread at once instead of when the garbage is collected.
        close = getattr(batches, "close", None)
        if close is not None:
            close()


def look(batch: Batch, learner: OnlineLearner, progress: Progress) -> None:
    """Score the interval of the leading rows of a batch, all of them where they are few."""
    rows = max(1, MOST_TARGETS // max(1, batch.y[0].numel()))
    predictive = learner.predict_dist(batch.x[:rows])
    progress.metrics.foresee(predictive, batch.y[:rows])
