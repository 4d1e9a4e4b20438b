"""The options of a model as one plain value, and the learner that they describe."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self

import torch
from torch import nn

from kalmanhead.backbones import load_factory, make_backbone
from kalmanhead.bank import HeadBank
from kalmanhead.buffer import Buffer
from kalmanhead.errors import ConfigError
from kalmanhead.head import Head, KalmanHead
from kalmanhead.learner import OnlineLearner, Order
from kalmanhead.optimizers import OptimizerFactory, adam, annealed, sgd
from kalmanhead.trained_head import TrainedHead

HEADS = ("auto", "reset", "drift", "forget", "static", "ridge", "adam", "sgd")
DTYPES = {"float32": torch.float32, "float64": torch.float64}
# Ten batches and a few more: on every stream tried it beats the newest model, drifting ones too.
AVERAGE = 0.95
# Batches after which the rate of the bank on vectors has fallen by the root of 2.
ANNEAL = 250.0


@dataclass(frozen=True)
class ModelConfig:
    """What kind of learner, in plain values that a configuration file can hold.

    Attributes
    ----------
    backbone:
        `auto` (by the shape of the rows), `linear`, `mlp`, `fno`, or `module:path.to:factory`.
    width, depth, modes:
        Size of the backbone; None for its default.
    skip:
        Put the scaled inputs among the head's features; None leaves it to the head, and the bank
        wants them.
    head:
        `auto` for the bank that needs no tuning, a transition of `KalmanHead`, or `adam` / `sgd`:
        the whole network trained by that optimiser, last layer included.
    mixing:
        How the bank mixes its heads: `soft` (its default) or `best`.
    lam, eta, gamma, lambda_scale:
        Prior precision lambda, rate of `drift`, factor of `forget`, and whether lambda stands
        against a sum or a mean over rows.
    order:
        `head-first` or `backbone-first`.
    optimizer, lr, clip:
        Of the backbone: `adam` or `sgd` (momentum 0.9), learning rate, largest gradient norm.
    anneal:
        Batches after which the rate has fallen by the root of 2, on its way to a tenth; 0 for a
        rate as it is. None: 250 for the bank on vectors at its own rate, otherwise 0.
    average:
        Decay of the moving average of the model that predicts beside the newest; 0 for none, None
        leaves it to the head, and the bank has one.
    robust:
        Leave out single targets that are off by more than 30 deviations of the usual errors and by
        more than 3 of the targets, and start anew after three in a row; None leaves it to the
        head, and the bank does.
    loss:
        `squared`, or `relative`: rows are weighed so that squared relative errors are minimised.
    buffer, buffer_kind:
        Rows kept for the backbone's steps, None for none; `reservoir` (a sample of all so far) or
        `recent`.
    dtype:
        Of a single head's state; the bank is float64.
    device:
        `auto`, `cpu`, `cuda` or `mps`.
    seed:
        Of the initial weights.
    """

    backbone: str = "auto"
    width: int | None = None
    depth: int | None = None
    modes: int | None = None
    skip: bool | None = None
    head: str = "auto"
    mixing: Literal["soft", "best"] | None = None
    lam: float | None = None
    eta: float | None = None
    gamma: float | None = None
    lambda_scale: str = "sum"
    order: str = "head-first"
    optimizer: str = "adam"
    lr: float | None = None
    clip: float | None = None
    anneal: float | None = None
    average: float | None = None
    robust: bool | None = None
    loss: str = "squared"
    buffer: int | None = None
    buffer_kind: str | None = None
    dtype: str = "float64"
    device: str = "auto"
    seed: int = 0

    @classmethod
    def from_mapping(cls, options: Mapping[str, Any]) -> Self:
        """Pick this configuration's options out of a larger mapping."""
        names = {field.name for field in dataclasses.fields(cls)}
        return cls(**{name: value for name, value in options.items() if name in names})


def choose_device(name: str) -> torch.device:
    """Device by name; `auto` takes CUDA where there is one.

    Raises
    ------
    ConfigError
        The device is not available here.
    """
    available = {
        "cpu": True,
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
    }
    if name == "auto":
        return torch.device("cuda" if available["cuda"] else "cpu")
    if not available.get(name, False):
        here = ", ".join(known for known, there in available.items() if there)
        raise ConfigError(f"device {name!r} is not available: choose auto or one of {here}")
    return torch.device(name)


def build_learner(
    config: ModelConfig,
    x_shape: tuple[int, ...],
    y_shape: tuple[int, ...],
    grid_dims: int = 0,
) -> OnlineLearner:
    """Build the learner that a configuration describes.

    Parameters
    ----------
    config:
        The options.
    x_shape, y_shape:
        Shape of one row: (d,) and (k,) for vectors, (channels, *grid) for fields.
    grid_dims:
        Grid dimensions: 0 for vectors, 1 or 2 for fields.

    Raises
    ------
    ConfigError
        Options or shapes that do not go together.

    Examples
    --------
    >>> learner = build_learner(ModelConfig(width=8), (3,), (1,))
    >>> learner.head.in_features
    11
    """
    _check_head_options(config)
    device = choose_device(config.device)
    factory = _optimizer(config, grid_dims)

    def make_head(
        in_features: int, out_features: int, *, bias: bool = True, feature_dim: int = -1
    ) -> Head:
        return _make_head(
            config, in_features, out_features, bias, feature_dim, device, x_shape[0] if skip else 0
        )

    own_code = config.backbone.startswith("module:")
    skip = (config.head == "auto" and not own_code) if config.skip is None else config.skip
    average = _default(config.average, AVERAGE if config.head == "auto" else 0.0)
    options: dict[str, Any] = {
        "skip": skip,
        "order": _order(config.order),
        "clip": config.clip,
        "average": average or None,
        "robust": config.head == "auto" if config.robust is None else config.robust,
        "relative": _relative(config.loss),
        "buffer": _buffer(config),
    }
    if own_code:
        model = _call_factory(config, x_shape, y_shape)
        dtype = next((p.dtype for p in model.parameters()), torch.float32)
        return OnlineLearner.wrap(
            model.to(device),
            factory,
            example=torch.zeros(1, *x_shape, dtype=dtype, device=device),
            head=make_head,
            scale_x=True,
            targets_in_units=False,
            **options,
        )
    backbone = make_backbone(
        config.backbone,
        x_shape,
        grid_dims,
        width=config.width,
        depth=config.depth,
        modes=config.modes,
        seed=config.seed,
    ).to(device)
    features = int(backbone.out_features) + (x_shape[0] if skip else 0)  # type: ignore[arg-type]
    feature_dim = int(backbone.feature_dim)  # type: ignore[arg-type]
    head = make_head(features, y_shape[0], feature_dim=feature_dim)
    return OnlineLearner(backbone, head, factory, **options)


def _make_head(
    config: ModelConfig,
    in_features: int,
    out_features: int,
    bias: bool,
    feature_dim: int,
    device: torch.device,
    inputs: int,
) -> Head:
    if config.dtype not in DTYPES:
        raise ConfigError(f"dtype {config.dtype!r} is unknown: choose float64 or float32")
    if config.head in ("adam", "sgd"):
        return TrainedHead(
            in_features,
            out_features,
            bias,
            feature_dim=feature_dim,
            seed=config.seed,
            device=device,
        )
    if config.head == "auto" and bias and device.type != "mps":
        return HeadBank(
            in_features,
            out_features,
            linear_features=inputs,
            mixing=config.mixing or "soft",
            feature_dim=feature_dim,
            device=device,
        )
    # Metal has no float64.
    dtype = torch.float32 if device.type == "mps" else DTYPES[config.dtype]
    return KalmanHead(
        in_features,
        out_features,
        bias,
        transition="reset" if config.head == "auto" else config.head,  # without a constant
        eta=config.eta,
        gamma=config.gamma,
        prior_precision=_default(config.lam, 100.0 if feature_dim == 1 else 10.0),
        lambda_scale=config.lambda_scale,  # type: ignore[arg-type]
        feature_dim=feature_dim,
        dtype=dtype,
        device=device,
    )


def _check_head_options(config: ModelConfig) -> None:
    """Refuse options that the head would not look at."""
    if config.head not in HEADS:
        raise ConfigError(f"head {config.head!r} is unknown: choose one of {', '.join(HEADS)}")
    single = ("reset", "drift", "forget", "static", "ridge")
    users = {
        "lam": single,
        "eta": ("drift",),
        "gamma": ("forget",),
        "lambda_scale": single,
        "dtype": single,
        "mixing": ("auto",),
    }
    plain = ModelConfig()
    for option, heads in users.items():
        if getattr(config, option) != getattr(plain, option) and config.head not in heads:
            raise ConfigError(
                f"{option} is not for head {config.head}: leave it out, or choose head "
                f"{' or '.join(heads)}"
            )


def _optimizer(config: ModelConfig, grid_dims: int) -> OptimizerFactory:
    name = config.head if config.head in ("adam", "sgd") else config.optimizer
    makers: dict[str, tuple[Callable[[float], OptimizerFactory], float]] = {
        "adam": (adam, 1.5e-2 if config.head == "auto" and grid_dims == 0 else 3e-3),
        "sgd": (sgd, 1e-2),
    }
    if name not in makers:
        raise ConfigError(f"optimizer {name!r} is unknown: choose adam or sgd")
    maker, lr = makers[name]
    made = maker(_default(config.lr, lr))
    bank_of_vectors = config.head == "auto" and grid_dims == 0 and config.lr is None
    batches = _default(config.anneal, ANNEAL if bank_of_vectors else 0.0)
    return annealed(made, batches) if batches != 0 else made


def _order(name: str) -> Order:
    if name in ("head-first", "backbone-first"):
        return name  # type: ignore[return-value]
    raise ConfigError(f"order is {name!r}: choose head-first or backbone-first")


def _relative(loss: str) -> bool:
    if loss not in ("squared", "relative"):
        raise ConfigError(f"loss is {loss!r}: choose squared or relative")
    return loss == "relative"


def _buffer(config: ModelConfig) -> Buffer | None:
    if config.buffer is None:
        if config.buffer_kind is not None:
            raise ConfigError("buffer_kind is for a buffer: give buffer, the rows that it keeps")
        return None
    return Buffer(config.buffer, config.buffer_kind or "reservoir", config.seed)


def _default(value: float | None, default: float) -> float:
    return default if value is None else value


def _call_factory(
    config: ModelConfig, x_shape: tuple[int, ...], y_shape: tuple[int, ...]
) -> nn.Module:
    return load_factory(config.backbone.removeprefix("module:"))(x_shape, y_shape)
