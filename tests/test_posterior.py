"""The identities of the measurement and time updates, against dense numpy."""

import itertools

import numpy as np
import oracles
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kalmanhead.errors import ConfigError, NumericalError
from kalmanhead.linalg import safe_cholesky
from kalmanhead.noise import Noise, log_evidence, update_noise
from kalmanhead.posterior import Posterior, cheaper_method, condition, forgotten
from kalmanhead.transition import Drift, Forget, Reset, Ridge, Static, make_transition

SHAPES = [(1, 1, 1), (3, 7, 2), (7, 3, 1), (20, 5, 3), (5, 20, 2), (64, 8, 1)]
PRECISIONS = [0.3, 10.0, 400.0]


def rows(n, d, k, seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(n, d)), rng.normal(size=(n, k)), rng.uniform(0.2, 3, n)


def close(actual, expected, tolerance=1e-9):
    torch.testing.assert_close(
        actual.double(), torch.as_tensor(expected), rtol=tolerance, atol=tolerance
    )


def prior(mean, precision, d, form="diagonal", dtype=torch.float64):
    variance = 1 / torch.as_tensor(precision, dtype=dtype).expand(d)
    mean = torch.as_tensor(mean, dtype=dtype)
    if form == "diagonal":
        return Posterior(mean, variance, form)
    spread = torch.diag_embed(variance if form == "dense" else variance.sqrt())
    return Posterior(mean, spread, form)


@pytest.mark.parametrize("form", ["diagonal", "dense", "root"])
@pytest.mark.parametrize("method", ["primal", "dual", "auto"])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(("n", "d", "k"), SHAPES)
def test_condition_equals_dense_solve(n, d, k, precision, method, form):
    phi, y, weight = rows(n, d, k)
    mean = np.random.default_rng(1).normal(size=(k, d))
    per_feature = precision * np.linspace(0.5, 2, d)
    expected, covariance = oracles.ridge(phi, y, per_feature, mean, weight)
    update = condition(
        prior(mean, per_feature, d, form), *map(torch.as_tensor, (phi, y, weight)), method=method
    )
    close(update.posterior.mean, expected)
    close(update.posterior.covariance, covariance)
    assert torch.equal(update.posterior.covariance, update.posterior.covariance.mT)
    kalman, _ = oracles.kalman(phi, y, mean, np.diag(1 / per_feature), weight)
    close(update.posterior.mean, kalman, 1e-8)


@pytest.mark.parametrize("lam", PRECISIONS)
def test_reset_is_the_papers_proximal_formula(lam):
    phi, y, _ = rows(16, 9, 3)
    before = np.random.default_rng(2).normal(size=(3, 9))
    believed = Posterior(torch.as_tensor(before), torch.eye(9, dtype=torch.float64))
    start = Reset().predict(believed, torch.full((9,), 1 / lam, dtype=torch.float64))
    update = condition(start, torch.as_tensor(phi), torch.as_tensor(y))
    paper = (y.T @ phi + lam * before) @ np.linalg.inv(phi.T @ phi + lam * np.eye(9))
    close(update.posterior.mean, paper)


def test_one_row_reset_is_normalised_least_mean_squares():
    phi, y, _ = rows(1, 6, 2)
    before = np.random.default_rng(3).normal(size=(2, 6))
    lam = 0.7
    update = condition(prior(before, lam, 6), torch.as_tensor(phi), torch.as_tensor(y))
    error = y[0] - before @ phi[0]
    close(update.posterior.mean, before + np.outer(error, phi[0]) / (lam + phi[0] @ phi[0]))


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(1, 40),
    d=st.integers(1, 12),
    cuts=st.lists(st.integers(0, 40), max_size=5),
    precision=st.sampled_from([0.01, 1.0, 50.0]),
    form=st.sampled_from(["diagonal", "dense", "root"]),
    order=st.randoms(use_true_random=False),
)
def test_static_over_any_split_and_order_is_one_ridge_solve(n, d, cuts, precision, form, order):
    phi, y, weight = rows(n, d, 2, seed=n * 13 + d)
    expected, covariance = oracles.ridge(phi, y, precision, weight=weight)
    index = list(range(n))
    order.shuffle(index)
    edges = [0, *sorted(min(c, n) for c in cuts), n]
    belief = prior(np.zeros((2, d)), precision, d, form)
    for start, stop in itertools.pairwise(edges):
        part = index[start:stop]
        belief = Static().predict(belief, torch.ones(d))
        belief = condition(belief, *(torch.as_tensor(a[part]) for a in (phi, y, weight))).posterior
    close(belief.mean, expected)
    close(belief.covariance, covariance)


def test_float32_takes_the_square_root_route():
    """Features of condition 1e6: the normal equations in float32 would see 1e12."""
    rng = np.random.default_rng(0)
    phi = rng.normal(size=(200, 6)) * np.logspace(0, -6, 6)
    y = phi @ (np.arange(1.0, 7) / np.logspace(0, -6, 6))[:, None]
    expected, _ = oracles.ridge(phi, y, 1e-16)
    belief = prior(np.zeros((1, 6)), 1e-16, 6, "root", torch.float32)
    for part in np.split(np.arange(200), 10):
        belief = condition(
            belief,
            torch.as_tensor(phi[part], dtype=torch.float32),
            torch.as_tensor(y[part], dtype=torch.float32),
        ).posterior
    assert belief.form == "root"
    prediction = phi @ belief.mean.double().numpy().T
    assert np.abs(prediction - phi @ expected.T).max() < 1e-4 * np.abs(y).max()
    assert np.linalg.eigvalsh(belief.covariance.double().numpy())[0] > -1e-7


@pytest.mark.parametrize("form", ["diagonal", "dense", "root"])
@pytest.mark.parametrize("method", ["primal", "dual"])
def test_a_switched_off_feature_is_not_there(form, method):
    phi, y, weight = (torch.as_tensor(a) for a in rows(12, 5, 2))
    precision = torch.tensor([2.0, torch.inf, 0.5, torch.inf, 1.0], dtype=torch.float64)
    belief = prior(np.zeros((2, 5)), precision, 5, form)
    on = [0, 2, 4]
    expected, _ = oracles.ridge(
        phi[:, on].numpy(), y.numpy(), precision[on].numpy(), weight=weight.numpy()
    )
    for rule in (Static(), Drift(0.2), Forget(0.8)):
        after = condition(rule.predict(belief, 1 / precision), phi, y, weight, method=method)
        twice = condition(rule.predict(after.posterior, 1 / precision), phi, y, method=method)
        for posterior in (after.posterior, twice.posterior):
            assert (posterior.mean[:, [1, 3]] == 0).all()
            assert (posterior.covariance[[1, 3]] == 0).all()
        close(after.posterior.mean[:, on], expected)


@pytest.mark.parametrize("form", ["diagonal", "dense", "root"])
def test_row_weights(form):
    phi, y, _ = (torch.as_tensor(a) for a in rows(6, 4, 2))
    belief = prior(np.zeros((2, 4)), 3.0, 4, form)
    twice = condition(belief, torch.cat([phi, phi[:1]]), torch.cat([y, y[:1]]))
    doubled = condition(belief, phi, y, torch.tensor([2.0, 1, 1, 1, 1, 1]).double())
    close(doubled.posterior.mean, twice.posterior.mean)
    close(doubled.quadratic, twice.quadratic)
    close(doubled.log_determinant, twice.log_determinant)
    without = condition(belief, phi[1:], y[1:])
    zero = condition(belief, phi, y, torch.tensor([0.0, 1, 1, 1, 1, 1]).double())
    close(zero.posterior.mean, without.posterior.mean)
    empty = condition(belief, phi[:0], y[:0])
    assert empty.posterior is belief
    assert (empty.quadratic == 0).all()


@pytest.mark.parametrize("method", ["primal", "dual"])
def test_a_bank_is_its_heads_side_by_side(method):
    phi, y, weight = (torch.as_tensor(a) for a in rows(6, 4, 2))
    lams = torch.tensor([0.1, 1.0, 30.0], dtype=torch.float64)
    variance = (1 / lams)[:, None].expand(3, 4)
    means = torch.zeros(3, 2, 4, dtype=torch.float64)
    bank = Posterior(means, variance, "diagonal")
    singles = [prior(np.zeros((2, 4)), float(lam), 4) for lam in lams]
    for _ in range(2):
        update = condition(bank, phi, y, weight, method=method)
        bank = update.posterior
        for i in range(3):
            single = condition(singles[i], phi, y, weight, method=method)
            singles[i] = single.posterior
            close(bank.mean[i], single.posterior.mean)
            close(bank.covariance[i], single.posterior.covariance)
            close(update.quadratic[i], single.quadratic)
            close(update.log_determinant[i], single.log_determinant)


@pytest.mark.parametrize("form", ["diagonal", "dense", "root"])
def test_drift_and_forget_against_their_formulas(form):
    phi, y, _ = (torch.as_tensor(a) for a in rows(12, 4, 1))
    variance = torch.tensor([0.5, 1.0, 2.0, 4.0], dtype=torch.float64)
    belief = condition(prior(np.zeros((1, 4)), 1 / variance, 4, form), phi, y).posterior
    p = belief.covariance
    drifted = Drift(0.3).predict(belief, variance).covariance
    close(drifted, 0.7 * p + 0.3 * torch.diag(variance))
    forgot = Forget(0.6).predict(belief, variance).covariance
    close(forgot, torch.linalg.inv(0.6 * torch.linalg.inv(p) + 0.4 * torch.diag(1 / variance)))
    close(
        Drift(1.0).predict(belief, variance).covariance,
        Reset().predict(belief, variance).covariance,
    )
    close(Drift(0.0).predict(belief, variance).covariance, p)
    close(Forget(1.0).predict(belief, variance).covariance, p)
    naive = Ridge().predict(belief, variance)
    assert (naive.mean == 0).all()
    close(naive.covariance, torch.diag(variance))


@pytest.mark.parametrize("rule", [Forget(0.8), Drift(0.1)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_an_idle_feature_never_winds_up(rule, dtype):
    generator = torch.Generator().manual_seed(0)
    variance = torch.ones(3, dtype=dtype)
    belief = prior(np.zeros((1, 3)), 1.0, 3, "root" if dtype == torch.float32 else "dense", dtype)
    for _ in range(300):
        phi = torch.randn(7, 3, generator=generator, dtype=dtype)
        phi[:, 1] = 0
        belief = rule.predict(belief, variance)
        belief = condition(belief, phi, phi[:, :1]).posterior
    covariance = belief.covariance.double()
    assert torch.linalg.eigvalsh(covariance)[0] > 0
    torch.testing.assert_close(covariance[1, 1], torch.tensor(1.0).double(), rtol=1e-4, atol=0)


def test_large_offset_features_keep_the_covariance_positive():
    generator = torch.Generator().manual_seed(0)
    belief = prior(np.zeros((1, 3)), 1e-4, 3, "root", torch.float32)
    for _ in range(300):
        phi = 1e4 + torch.randn(64, 3, generator=generator)
        belief = condition(belief, phi, phi[:, :1] - 1e4).posterior
    # The root is the state: P = F F' is positive as long as F is regular and finite.
    assert torch.linalg.svdvals(belief.spread.double())[-1] > 0
    assert torch.isfinite(belief.spread).all()


@pytest.mark.parametrize("form", ["dense", "root"])
@pytest.mark.parametrize("method", ["primal", "dual"])
def test_evidence_is_the_student_t_density(form, method):
    phi, y, _ = rows(5, 3, 2)
    update = condition(
        prior(np.zeros((2, 3)), 2.0, 3, form),
        torch.as_tensor(phi),
        torch.as_tensor(y),
        method=method,
    )
    noise = Noise(torch.tensor([1.5, 4.0]).double(), torch.tensor([0.7, 9.0], dtype=torch.float64))
    s = np.eye(5) + phi @ phi.T / 2
    expected = sum(
        oracles.log_student_t(y[:, j], np.zeros(5), b / a * s, 2 * a)
        for j, (a, b) in enumerate([(1.5, 0.7), (4.0, 9.0)])
    )
    close(log_evidence(noise, update, torch.tensor(5.0).double()), expected)
    quadratic = [y[:, j] @ np.linalg.solve(s, y[:, j]) for j in range(2)]
    learnt = update_noise(noise, update.quadratic, torch.tensor(5.0).double())
    close(learnt.shape, np.array([4.0, 6.5]))
    close(learnt.rate, np.array([0.7, 9.0]) + np.array(quadratic) / 2)


def test_cost_rule_picks_by_size():
    assert cheaper_method(8, 128, "diagonal", False) == "dual"
    assert cheaper_method(128, 8, "diagonal", False) == "primal"
    assert cheaper_method(64, 128, "dense", True) == "dual"
    assert cheaper_method(4000, 64, "dense", True) == "primal"


def test_safe_cholesky_tells_nan_from_indefinite_and_reports_its_jitter():
    with pytest.raises(NumericalError, match="the thing holds NaN"):
        safe_cholesky(torch.full((2, 2), torch.nan), "the thing")
    with pytest.raises(NumericalError, match="not positive definite, even with"):
        safe_cholesky(torch.tensor([[1.0, 0.0], [0.0, -1.0]]))
    almost = torch.ones(2, 2, dtype=torch.float64) - 1e-16
    almost[1, 1] = 1 - 1e-15
    with pytest.warns(RuntimeWarning, match="of its mean diagonal"):
        factor = safe_cholesky(torch.stack([almost, torch.eye(2).double()]))
    close(factor[0] @ factor[0].T, almost, 1e-12)
    close(factor[1], np.eye(2), 1e-15)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("kalman", {}, "choose reset, drift, forget, static"),
        ("drift", {"eta": 1.5}, "eta is 1.5"),
        ("forget", {"gamma": 0.0}, "gamma is 0"),
    ],
)
def test_transition_names_and_ranges(name, options, message):
    with pytest.raises(ConfigError, match=message):
        make_transition(name, **options)


@pytest.mark.parametrize("form", ["diagonal", "dense", "root"])
def test_forgotten_features_are_back_at_the_prior_and_the_others_stay(form):
    phi, y, _ = (torch.as_tensor(a) for a in rows(12, 5, 2))
    variance = torch.tensor([0.5, 1.0, 2.0, 4.0, 8.0], dtype=torch.float64)
    belief = prior(np.zeros((2, 5)), 1 / variance, 5, form)
    belief = condition(belief, phi, y, keep_covariance=form != "diagonal").posterior
    lost = torch.tensor([False, True, True])
    after = forgotten(belief, lost, variance[1:4][lost])
    keep, gone = [0, 1, 4], [2, 3]
    assert (after.mean[:, gone] == 0).all()
    torch.testing.assert_close(after.mean[:, keep], belief.mean[:, keep])
    expected = belief.covariance.clone()
    expected[gone] = 0
    expected[:, gone] = 0
    expected[gone, gone] = variance[gone]
    close(after.covariance, expected)


@pytest.mark.parametrize("weighted", [False, True])
def test_float32_with_fewer_rows_than_features_needs_no_matrix_of_their_size(weighted):
    phi, y, weight = (torch.as_tensor(a) for a in rows(5, 40, 2))
    weight = weight if weighted else None
    precision = torch.linspace(0.5, 3.0, 40, dtype=torch.float64)
    expected = condition(prior(np.zeros((2, 40)), precision, 40), phi, y, weight)
    single = prior(np.zeros((2, 40)), precision, 40, "diagonal", torch.float32)
    update = condition(
        single,
        phi.float(),
        y.float(),
        None if weight is None else weight.float(),
        keep_covariance=False,
    )
    assert update.factor.shape == (5, 5)
    for name in ("innovation", "leverage", "quadratic", "log_determinant"):
        theirs = getattr(expected, name)
        torch.testing.assert_close(getattr(update, name).double(), theirs, rtol=1e-4, atol=1e-5)
    mean = update.posterior.mean.double()
    torch.testing.assert_close(mean, expected.posterior.mean, rtol=1e-4, atol=1e-5)


def test_float32_keeps_its_digits_with_fewer_rows_than_features():
    """Two rows that differ by 1e-4: S in float32 would lose what tells them apart."""
    base = torch.ones(1, 30, dtype=torch.float64)
    phi = torch.cat([base, base + 1e-4 * torch.eye(30, dtype=torch.float64)[:1]])
    y = torch.tensor([[1.0], [1.001]], dtype=torch.float64)
    exact = condition(prior(np.zeros((1, 30)), 1e-12, 30), phi, y).posterior.mean
    single = prior(np.zeros((1, 30)), 1e-12, 30, "diagonal", torch.float32)
    ours = condition(single, phi.float(), y.float(), keep_covariance=False).posterior.mean
    torch.testing.assert_close(ours.double(), exact, rtol=2e-2, atol=1e-3)
