"""How forecasters stand to one another: who foresaw the rows, and how much each is to be believed.

Every forecaster's error is judged by a Student t whose scale is learnt from its own earlier
errors; log densities are added up, fade with every sample (so that the world may change), and are
shared out a little after every batch (fixed share: Herbster and Warmuth, 1998), so that whoever
was wrong for long can come back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kalmanhead.noise import BOUNDS, Noise, update_noise

# One row can lower a forecaster's standing against the best by no more than this, in nats: a
# single outlier would otherwise put the vaguest in charge.
MOST_NATS = 1.0


@dataclass(frozen=True)
class Standing:
    """Scores and learnt noise of several forecasters, for each output; an immutable value.

    Attributes
    ----------
    scores:
        Log weights up to a constant, (heads, k).
    noise:
        Belief about the variance of each one's standardised errors, (heads, k).
    discount:
        Factor by which scores fade with every sample.
    share:
        Weight that is spread evenly over all forecasters after each batch.
    """

    scores: Tensor
    noise: Noise
    discount: float = 0.99
    share: float = 0.01

    @classmethod
    def start(
        cls,
        heads: int,
        outputs: int,
        device: torch.device | str | None = None,
        *,
        discount: float = 0.99,
        share: float = 0.01,
    ) -> Standing:
        """All alike, and a prior noise of 1, worth two rows."""
        scores = torch.zeros(heads, outputs, dtype=torch.float64, device=device)
        ones = torch.ones_like(scores)
        return cls(scores, Noise(ones, ones), discount, share)

    @property
    def weights(self) -> Tensor:
        """Weight of each forecaster for each output, (heads, k)."""
        return self.scores.softmax(0)

    @property
    def shares(self) -> Tensor:
        """Part of each in the mixture, (heads, k): its weight without what was shared out.

        That keeps the door open for those who foresee badly; it is no reason to listen to them.
        """
        heads = self.scores.shape[0]
        earned = (self.weights - self.share / heads).clamp_min(0)
        return (earned + 1e-12 / heads) / (earned.sum(0) + 1e-12)

    def after(
        self,
        innovation: Tensor,
        leverage: Tensor | None,
        seen: Tensor,
        counted: Tensor,
        noise_discount: Tensor,
        samples: float,
        points: int = 1,
        awake: Tensor | None = None,
    ) -> Standing:
        """Standing after the rows of a batch.

        Parameters
        ----------
        innovation:
            Target minus forecast, (heads, rows, k).
        leverage:
            Variance of each forecast from what is not known yet, in units of the noise,
            (heads, rows); None for none.
        seen:
            Weight of each target, 0 where there is none, (rows, k); 2 counts as the row twice.
        counted:
            Its sum, (k,).
        noise_discount:
            How much of the noise's earlier rows is kept, (k,).
        samples, points:
            Summed weight of the independent samples, and rows that each consists of: the points of
            a field count as one sample.
        awake:
            Which forecasters these rows are of, (heads,), whole numbers; None for all. The others
            stand where the share puts them.
        """
        scores, noise = self.scores, self.noise
        if awake is not None:
            scores, noise = scores[awake], Noise(noise.shape[awake], noise.rate[awake])
        squares = innovation.square().clamp_max(BOUNDS[innovation.dtype][1])
        if leverage is not None:
            squares = squares / (1 + leverage[..., None])
        evidence = log_student_t(squares, leverage, noise)
        evidence = torch.maximum(evidence, evidence.amax(0) - MOST_NATS) * seen
        gain = evidence.sum(1) / points
        weights = (self.discount**samples * scores + gain).softmax(0)
        noise = update_noise(noise, (squares * seen).sum(-2), counted, noise_discount)
        if awake is not None:
            weights = torch.zeros_like(self.scores).index_copy(0, awake, weights)
            noise = Noise(
                self.noise.shape.index_copy(0, awake, noise.shape),
                self.noise.rate.index_copy(0, awake, noise.rate),
            )
        shared = (1 - self.share) * weights + self.share / weights.shape[0]
        return replace(self, scores=shared.log(), noise=noise)

    def moved(self, fn: Callable[[Tensor], Tensor]) -> Standing:
        """The same elsewhere, in the same dtype."""
        scores = fn(self.scores).to(self.scores.dtype)
        return replace(self, scores=scores, noise=self.noise.moved(fn))

    def state(self) -> dict[str, Any]:
        """What must be kept to go on exactly."""
        return {"scores": self.scores, "noise": self.noise.state()}

    def loaded(self, state: dict[str, Any]) -> Standing:
        """Standing that goes on from what `state` returned."""
        noise = Noise.from_state(state["noise"], self.scores)
        return replace(self, scores=state["scores"].to(self.scores).clone(), noise=noise)

    def rescaled(self, ratio: Tensor) -> Standing:
        """The same for outputs that are now `ratio` times as large, (k,)."""
        return replace(self, noise=self.noise.rescaled(ratio))

    def forgotten(self, lost: Tensor) -> Standing:
        """The same with nothing known of the noise of the outputs of `lost`, (k,)."""
        return replace(self, noise=self.noise.forgotten(lost))


def log_student_t(squares: Tensor, leverage: Tensor | None, noise: Noise) -> Tensor:
    """Log density of each row under each forecaster, up to a constant, (heads, n, k).

    Parameters
    ----------
    squares:
        innovation^2 / (1 + leverage), (heads, n, k).
    leverage:
        As in `Standing.after`, (heads, n).
    noise:
        Belief before the rows, (heads, k): a Student t with 2a degrees of freedom, scale b / a.
    """
    a, b = noise.shape[:, None], noise.rate[:, None]
    height = torch.lgamma(a + 0.5) - torch.lgamma(a) - b.log() / 2
    density = height - (a + 0.5) * torch.log1p(squares / (2 * b))
    return density if leverage is None else density - torch.log1p(leverage)[..., None] / 2
