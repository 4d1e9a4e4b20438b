"""KalmanHead and TrainedHead: one table of heads, every law for each."""

import numpy as np
import oracles
import pytest
import torch

from kalmanhead.errors import ConfigError, NumericalError
from kalmanhead.head import KalmanHead
from kalmanhead.trained_head import TrainedHead

KALMAN = {
    "reset": {"transition": "reset"},
    "drift": {"transition": "drift", "eta": 0.2},
    "forget": {"transition": "forget", "gamma": 0.9},
    "static": {"transition": "static"},
    "ridge": {"transition": "ridge"},
    "static float32": {"transition": "static", "dtype": torch.float32},
    "drift mean": {"transition": "drift", "eta": 0.2, "lambda_scale": "mean"},
    "reset no bias": {"transition": "reset", "bias": False},
}
CASES = [*KALMAN, "trained"]


def make(case, d=3, k=2, feature_dim=-1, lam=2.0):
    if case == "trained":
        return TrainedHead(d, k, feature_dim=feature_dim)
    return KalmanHead(d, k, prior_precision=lam, feature_dim=feature_dim, **KALMAN[case])


def batches(count=4, n=6, d=3, k=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(n, d, generator=generator), torch.randn(n, k, generator=generator))
        for _ in range(count)
    ]


@pytest.mark.parametrize("case", CASES)
def test_state_goes_on_exactly(case):
    whole, first, second = make(case), make(case), make(case)
    data = batches()
    for phi, y in data:
        whole.update(phi, y)
    for phi, y in data[:2]:
        first.update(phi, y)
    second.load_state(first.state())
    for phi, y in data[2:]:
        second.update(phi, y)
    for name, value in whole.state().items():
        other = second.state()[name]
        assert torch.equal(value, other) if isinstance(value, torch.Tensor) else value == other
    with pytest.raises(ConfigError, match="build the head with the options"):
        make(case, d=4).load_state(first.state())


@pytest.mark.parametrize("case", CASES)
def test_predicting_changes_nothing_and_an_empty_batch_neither(case):
    head = make(case)
    phi, y = batches(1)[0]
    head.update(phi, y)
    before = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in head.state().items()}
    head(phi)
    head.predict_dist(phi)
    head.update(phi[:0], y[:0])
    head.update(phi, torch.full_like(y, torch.nan))
    head.update(phi, y, torch.zeros(len(phi)))
    for name, value in head.state().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("grid", [(5,), (3, 4)])
def test_fields_are_rows(case, grid):
    generator = torch.Generator().manual_seed(0)
    phi = torch.randn(4, 3, *grid, generator=generator)
    y = torch.randn(4, 2, *grid, generator=generator)
    weight = torch.tensor([1.0, 2.0, 0.5, 1.0])
    field, flat = make(case, feature_dim=1), make(case)
    rows = phi.movedim(1, -1).reshape(-1, 3)
    targets = y.movedim(1, -1).reshape(-1, 2)
    field.update(phi, y, weight)
    flat.update(rows, targets, weight.repeat_interleave(int(np.prod(grid))))
    torch.testing.assert_close(field.weight, flat.weight)
    expected = flat(rows).reshape(4, *grid, 2).movedim(-1, 1)
    torch.testing.assert_close(field(phi), expected)
    dist = field.predict_dist(phi)
    torch.testing.assert_close(dist.mean.float(), field(phi), rtol=1e-4, atol=1e-5)
    scale = flat.predict_dist(rows).scale.reshape(4, *grid, 2).movedim(-1, 1)
    torch.testing.assert_close(dist.scale, scale)


@pytest.mark.parametrize("case", CASES)
def test_rescaling_targets_keeps_predictions(case):
    head = make(case)
    if not head.has_bias:
        ratio, offset = torch.tensor([2.0, 0.1]), torch.zeros(2)
    else:
        ratio, offset = torch.tensor([2.0, 0.1]), torch.tensor([-3.0, 5.0])
    phi, y = batches(1)[0]
    head.update(phi, y)
    before = head.predict_dist(phi)
    head.rescale_targets(ratio, offset)
    after = head.predict_dist(phi)
    torch.testing.assert_close(after.mean, before.mean * ratio + offset)
    torch.testing.assert_close(after.scale, before.scale * ratio)


@pytest.mark.parametrize("case", [case for case in CASES if case != "reset no bias"])
def test_rescaling_inputs_keeps_predictions(case):
    head = make(case)
    ratio, offset = torch.tensor([2.0, 0.5]), torch.tensor([-1.0, 3.0])
    for phi, y in batches(2):
        head.update(phi, y)
    before = head.predict_dist(phi)
    head.rescale_inputs(ratio, offset)
    moved = phi.clone()
    moved[:, :2] = (phi[:, :2] - offset) / ratio
    after = head.predict_dist(moved)
    torch.testing.assert_close(after.mean, before.mean)
    if case.startswith("static"):
        torch.testing.assert_close(after.scale, before.scale)


@pytest.mark.parametrize("case", CASES)
def test_what_cannot_be_learnt_is_refused_and_leaves_the_state(case):
    head = make(case)
    phi, y = batches(1)[0]
    head.update(phi, y)
    before = head.weight.detach().clone()
    with pytest.raises(ConfigError, match="the head expects 3 in dimension -1"):
        head.update(phi[:, :2], y)
    with pytest.raises(ConfigError, match="expected 2 in dimension -1"):
        head.update(phi, y[:, :1])
    with pytest.raises(ConfigError, match="negative or non-finite"):
        head.update(phi, y, -torch.ones(6))
    with pytest.raises(ConfigError, match="one per sample"):
        head.update(phi, y, torch.ones(5))
    if case != "trained":
        with pytest.raises(NumericalError):
            head.update(phi * torch.nan, y)
    assert torch.equal(head.weight, before)


@pytest.mark.parametrize("lambda_scale", ["sum", "mean"])
@pytest.mark.parametrize("lam", [0.5, 30.0])
def test_lambda_scale(lambda_scale, lam):
    head = KalmanHead(3, 1, bias=False, prior_precision=lam, lambda_scale=lambda_scale)
    mean = np.zeros((1, 3))
    for phi, y in [*batches(2, n=6, k=1), *batches(1, n=3, k=1)]:
        head.update(phi, y)
        scaled = lam * (len(phi) if lambda_scale == "mean" else 1)
        mean, _ = oracles.ridge(phi.double().numpy(), y.double().numpy(), scaled, mean)
        torch.testing.assert_close(head.weight, torch.as_tensor(mean), rtol=1e-9, atol=1e-9)


def test_static_with_constant_equals_ridge():
    head = make("static", lam=torch.tensor([1e-9, 1.0, 2.0, 3.0]))
    data = batches(5)
    for phi, y in data:
        head.update(phi, y)
    phi = torch.cat([phi for phi, _ in data]).double().numpy()
    phi = np.concatenate([np.ones((len(phi), 1)), phi], 1)
    y = torch.cat([y for _, y in data]).double().numpy()
    expected, covariance = oracles.ridge(phi, y, np.array([1e-9, 1.0, 2.0, 3.0]))
    torch.testing.assert_close(head.weight, torch.as_tensor(expected), rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(head.covariance, torch.as_tensor(covariance), rtol=1e-7, atol=1e-7)


def test_a_missing_target_teaches_nothing_about_its_own_output():
    head, reference = make("static"), make("static")
    phi, y = batches(1)[0]
    holed = y.clone()
    holed[2] = torch.nan
    head.update(phi, holed)
    keep = [0, 1, 3, 4, 5]
    reference.update(phi[keep], y[keep])
    torch.testing.assert_close(head.weight, reference.weight)
    partly = y.clone()
    partly[2, 1] = torch.nan
    both = make("static")
    both.update(phi, partly)
    full = make("static")
    full.update(phi, y)
    torch.testing.assert_close(both.weight[0], full.weight[0])
    torch.testing.assert_close(both.noise.shape[1], reference.noise.shape[1])


def test_noise_is_learnt_per_output_and_followed():
    generator = torch.Generator().manual_seed(0)
    head = KalmanHead(2, 2, transition="static", noise_memory=1000)
    for sigma in (0.01, 100.0):
        for _ in range(300):
            phi = torch.randn(32, 2, generator=generator, dtype=torch.float64)
            e = torch.randn(32, 2, generator=generator, dtype=torch.float64)
            head.update(phi, phi + e * torch.tensor([sigma, 1000 * sigma], dtype=torch.float64))
        learnt = head.noise.variance.sqrt() / torch.tensor([sigma, 1000 * sigma])
        assert ((learnt > 0.9) & (learnt < 1.1)).all(), learnt


def test_intervals_of_the_student_t_cover():
    generator = torch.Generator().manual_seed(1)
    inside = total = 0
    for _ in range(120):
        head = KalmanHead(3, 1, transition="static", prior_precision=1.0)
        w = torch.randn(3, generator=generator)
        for step in range(8):
            phi = torch.randn(4, 3, generator=generator)
            y = (phi @ w + torch.randn(4, generator=generator))[:, None]
            if step:
                low, high = head.predict_dist(phi).interval(0.9)
                inside += int(((low <= y) & (y <= high)).sum())
                total += 4
            head.update(phi, y)
    assert 0.88 < inside / total < 0.92, inside / total


def test_moving_to_another_dtype_keeps_the_state_in_float64():
    assert make("static").float().weight.dtype == torch.float64


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prior_precision": 0.0}, "must be positive"),
        ({"prior_precision": torch.ones(2)}, "one for each of the 4 features"),
        ({"lambda_scale": "rows"}, "choose sum or mean"),
        ({"dtype": torch.float16}, "use float64 or float32"),
        ({"feature_dim": 2}, "feature_dim is 2"),
        ({"noise_memory": 0}, "noise_memory is 0"),
    ],
)
def test_options_are_checked(options, message):
    with pytest.raises(ConfigError, match=message):
        KalmanHead(3, 1, **options)
