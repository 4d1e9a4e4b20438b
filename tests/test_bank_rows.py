"""A batch as a bank sees it: sums in place of rows, and some points that judge for all."""

import pytest
import torch

from kalmanhead.bank import HeadBank
from kalmanhead.bank_rows import JUDGES, BankRows
from kalmanhead.posterior import Posterior, condition, condition_sums


def close(a, b, rtol=1e-9):
    torch.testing.assert_close(a, b, rtol=rtol, atol=1e-10)


@pytest.mark.parametrize("form", ["diagonal", "dense"])
@pytest.mark.parametrize("weighted", [False, True])
def test_sums_give_what_the_rows_give(form, weighted):
    generator = torch.Generator().manual_seed(0)
    phi, y = (torch.randn(50, n, generator=generator).double() for n in (7, 2))
    weight = torch.rand(50, generator=generator).double() if weighted else None
    spread = torch.rand(3, 7, generator=generator).double()
    if form == "dense":
        root = torch.randn(3, 7, 7, generator=generator).double()
        spread = root @ root.mT
    prior = Posterior(torch.randn(3, 2, 7, generator=generator).double(), spread, form)
    scaled = phi if weight is None else phi * weight[:, None]
    for keep in (True, False):
        ours = condition_sums(prior, scaled.mT @ phi, scaled.mT @ y, keep_covariance=keep)
        theirs = condition(prior, phi, y, weight, method="primal", keep_covariance=keep).posterior
        close(ours.mean, theirs.mean)
        close(ours.spread, theirs.spread)


def fields(points, samples=20, channels=3):
    generator = torch.Generator().manual_seed(1)
    phi = torch.randn(samples, channels, points, generator=generator)
    return phi, phi[:, :1] + 0.1 * torch.randn(samples, 1, points, generator=generator)


def test_every_sample_judges_and_in_time_every_point():
    phi, y = fields(64, samples=40)
    seen = torch.zeros(40 * 64)
    for turn in range(9):
        batch = BankRows(phi, y, None, 1, turn)
        assert batch.judges is not None
        assert len(batch.judges) >= JUDGES - 40
        assert batch.judges.div(64, rounding_mode="floor").unique().numel() == 40
        close(batch.heard.sum(0), batch.seen.sum(0))
        seen[batch.judges] += 1
    assert (seen > 0).all()


def test_rows_of_a_table_all_judge():
    batch = BankRows(torch.randn(5000, 3), torch.randn(5000, 1), None, -1, 0)
    assert batch.summed
    assert batch.judges is None


def test_a_missing_target_is_learnt_row_by_row():
    phi, y = fields(64)
    y[3, 0, 5] = torch.nan
    batch = BankRows(phi, y, None, 1, 0)
    assert not batch.summed
    assert batch.judges is None


def test_some_points_judge_as_all_do(monkeypatch):
    banks = []
    for judges in (128, 10**9):
        monkeypatch.setattr("kalmanhead.bank_rows.JUDGES", judges)
        bank = HeadBank(3, 1, linear_features=1, feature_dim=1)
        for seed in range(30):
            generator = torch.Generator().manual_seed(seed)
            phi = torch.randn(20, 3, 64, generator=generator)
            noise = torch.randn(20, 1, 64, generator=generator)
            bank.update(phi, phi.sum(1, keepdim=True) + 0.1 * noise)
        banks.append(bank)
    some, every = banks
    lead = int(every.weights[:, 0].argmax())
    for bank in banks:
        assert bank.leaders(1)[0][0].startswith(("proximal", "deep"))
        assert bank.standing.noise.variance[lead, 0] == pytest.approx(0.01, rel=0.1)
    close(some.weight, every.weight, rtol=2e-3)
