"""The options of a row-by-row learner as one plain value, and the learner that they describe."""

from __future__ import annotations

import dataclasses
from typing import Any, get_args, get_type_hints

import torch

from kalmanhead.backbones import make_backbone
from kalmanhead.bank import HeadBank
from kalmanhead.bank_group import DEFAULT_GRID, Grid
from kalmanhead.batch import LARGEST_VALUE
from kalmanhead.errors import ConfigError, shown
from kalmanhead.learner import OnlineLearner
from kalmanhead.optimizers import adam, sgd

# By head: the rate eta and the block of a bank that holds this head alone.
SINGLE = {"reset": (1.0, "proximal"), "drift": (0.01, "deep"), "static": (0.0, "deep")}
HEADS = ("auto", *SINGLE)
# Decay of the moving average at each step of the backbone, beside the bank: with 8 rows a step it
# spans as many rows as 0.95 does with 16.
AVERAGE = 0.975
LARGEST_SIZE = 2**16
WORDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "True or False",
    str: "a name",
    type(None): "None",
}
# A prior precision beyond these leaves no digit to the data, or none to the prior.
RANGES = {
    "width": (1, LARGEST_SIZE),
    "depth": (0, LARGEST_SIZE),
    "seed": (0, 2**63 - 1),
    "lam": (1e-12, 1e12),
    "eta": (0, 1),
}
OPTIMIZERS = {"adam": (adam, 1.5e-2), "sgd": (sgd, 1e-2)}


@dataclasses.dataclass(frozen=True)
class RowConfig:
    """What kind of learner, in plain values; those of `KalmanHeadRegressor`."""

    backbone: str = "mlp"
    width: int = 32
    depth: int | None = None
    skip: bool | None = None
    head: str = "auto"
    lam: float | None = None
    eta: float | None = None
    optimizer: str = "adam"
    lr: float | None = None
    clip: float | None = None
    average: float | None = None
    robust: bool | None = None
    seed: int = 0

    def build(self, inputs: int, outputs: int, one_hot: bool) -> OnlineLearner:
        """Build the learner, in float64: in float32 one row and many give other predictions.

        Raises
        ------
        ConfigError
            Options that are no such values, or do not go together.
        """
        self._check_kinds()
        if self.backbone not in ("mlp", "linear"):
            raise ConfigError(f"backbone is {self.backbone!r}: choose mlp or linear")
        linear = self.backbone == "linear"
        sizes = {} if linear else {"width": self.width, "depth": self.depth}
        backbone = make_backbone(self.backbone, (inputs,), 0, seed=self.seed, **sizes).double()
        bank = self.head == "auto"
        skip = (bank and not linear) if self.skip is None else self.skip
        features = (inputs if skip else 0) + int(backbone.out_features)  # type: ignore[arg-type]
        head = HeadBank(
            features,
            outputs,
            linear_features=inputs if bank and (skip or linear) else 0,
            grid=self._grid(linear and not skip),
        )
        average = (AVERAGE if bank else 0.0) if self.average is None else self.average
        if self.optimizer not in OPTIMIZERS:
            raise ConfigError(f"optimizer {self.optimizer!r} is unknown: choose adam or sgd")
        make, rate = OPTIMIZERS[self.optimizer]
        rate = rate if self.lr is None else self.lr
        learner = OnlineLearner(
            backbone,
            head,
            make(rate),
            skip=skip,
            scale_y=not one_hot,
            clip=self.clip,
            average=average or None,
            robust=bank if self.robust is None else self.robust,
        )
        learner.dtype = torch.float64  # which a backbone without parameters does not tell
        return learner

    def _grid(self, linear: bool) -> Grid:
        """Heads of the bank: the default ones, or a single one."""
        if self.head not in HEADS:
            raise ConfigError(f"head {self.head!r} is unknown: choose one of {', '.join(HEADS)}")
        if self.eta is not None and self.head != "drift":
            raise ConfigError(
                f"eta is not for head {self.head}: leave it out, or choose head drift"
            )
        if self.head == "auto":
            if self.lam is not None:
                raise ConfigError(
                    f"lam is not for head auto: leave it out, or choose head {' or '.join(SINGLE)}"
                )
            return {k: v for k, v in DEFAULT_GRID.items() if not linear or k != "deep"}
        eta, block = SINGLE[self.head]
        lam = (10.0 if self.head == "reset" else 1.0) if self.lam is None else self.lam
        return {block: ((lam, eta if self.eta is None else self.eta),)}

    def _check_kinds(self) -> None:
        """Refuse values of another kind than their option, and sizes beyond all reason."""
        for name, hint in get_type_hints(type(self)).items():
            value, kinds = getattr(self, name), get_args(hint) or (hint,)
            fits = isinstance(value, (*kinds, int) if float in kinds else kinds)
            if fits and float in kinds and isinstance(value, int):
                fits = abs(value) < LARGEST_VALUE
            if not fits or (isinstance(value, bool) and bool not in kinds):
                wanted = " or ".join(WORDS[kind] for kind in kinds)
                raise ConfigError(f"{name} is {shown(value)}: give {wanted}")
        for name, (least, most) in RANGES.items():
            value = getattr(self, name)
            if value is not None and not least <= value <= most:
                raise ConfigError(f"{name} is {shown(value)}: give {least:g} to {most:g}")
