"""The river estimators: river's own suite, and what it does not look at."""

import copy
import inspect
import math
import pickle
import tracemalloc
import warnings
from collections import Counter, defaultdict
from decimal import Decimal

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from river import (
    bandit,
    checks,
    compose,
    datasets,
    drift,
    evaluate,
    linear_model,
    metrics,
    model_selection,
    multioutput,
    preprocessing,
    proba,
    utils,
)

from kalmanhead import row_kernel, row_model
from kalmanhead.errors import ConfigError
from kalmanhead.estimators import (
    KalmanHeadClassifier,
    KalmanHeadMultiTargetRegressor,
    KalmanHeadRegressor,
    Slope,
)

# One table of estimators drives the tests that all of them must pass.
ESTIMATORS = [KalmanHeadRegressor, KalmanHeadMultiTargetRegressor, KalmanHeadClassifier]
SETTINGS = {
    "default": {},
    "reset": {"head": "reset", "width": 8},
    "linear": {"backbone": "linear", "head": "static"},
    "drift": {
        "head": "drift", "eta": 0.01, "skip": True, "average": 0.9, "backbone_every": 4,
        "optimizer": "sgd", "absent": "zero",
    },
}  # fmt: skip
SMALL = {"width": 8, "backbone_every": 4}
FAST = {"backbone": "linear", "head": "static"}


def each(settings=("default", "reset", "linear", "drift")):
    cases = [(kind, name) for kind in ESTIMATORS for name in settings]
    return pytest.mark.parametrize(
        ("kind", "setting"), cases, ids=[f"{k.__name__}-{s}" for k, s in cases]
    )


def stream(n, kind=KalmanHeadRegressor, seed=0, names="abcd"):
    """Rows of named features, and a target of the kind's form."""
    rng = np.random.default_rng(seed)
    for _ in range(n):
        x = dict(zip(names, rng.normal(size=len(names)).tolist(), strict=True))
        a, b = list(x.values())[:2]
        value = 10 + 3 * a + math.sin(2 * b) + 0.1 * rng.normal()
        if kind is KalmanHeadClassifier:
            yield x, ("low", "middle", "high")[int(value > 8) + int(value > 12)]
        elif kind is KalmanHeadMultiTargetRegressor:
            yield x, {"one": value, "two": -100 * value}
        else:
            yield x, value


def learnt(model, rows):
    for x, y in rows:
        model.learn_one(x, y)
    return model


def answer(model, x):
    """All that a model says of a row, as plain numbers."""
    if isinstance(model, KalmanHeadClassifier):
        return model.predict_proba_one(x)
    dist = model.predict_one(x, with_dist=True)
    if isinstance(model, KalmanHeadMultiTargetRegressor):
        return {name: (value.mu, value.sigma) for name, value in dist.items()}
    return {"y": (dist.mu, dist.sigma)}


def assert_same(a, b, rel=1e-9):
    assert a.keys() == b.keys()
    for name in a:
        assert a[name] == pytest.approx(b[name], rel=rel)


@each()
def test_rivers_suite(kind, setting):
    import sklearn

    assert sklearn is not None
    assert utils.pandas.PANDAS_INSTALLED, "river leaves its mini-batch checks out without pandas"
    model = kind(**SETTINGS[setting])
    assert model._unit_test_skips() == set()
    ran = Counter()
    for check in checks.yield_checks(model):
        check(model.clone())
        ran[check.__name__] += 1
    expected = {"check_shuffle_features_no_impact", "check_bounded_memory_growth"}
    if kind is not KalmanHeadMultiTargetRegressor:
        expected |= {"check_predict_many_matches_predict_one", "check_learn_many_matches_learn_one"}
    if kind is KalmanHeadClassifier:
        expected.add("check_predict_proba_many_matches_predict_proba_one")
        expected.add("check_classifier_tracks_seen_labels")
    assert expected <= set(ran)


@each()
def test_learn_many_is_a_loop_of_learn_one(kind, setting):
    rows = list(stream(50, kind))
    one = learnt(kind(**SETTINGS[setting]), rows)
    many = kind(**SETTINGS[setting])
    for part in (rows[:7], [], rows[7:]):
        targets = [y for _, y in part]
        y = pd.DataFrame(targets) if kind is KalmanHeadMultiTargetRegressor else pd.Series(targets)
        many.learn_many(pd.DataFrame([x for x, _ in part], columns=list("abcd")), y)
    assert_same(answer(one, rows[0][0]), answer(many, rows[0][0]))


@each()
def test_the_state_survives_pickling_at_any_row(kind, setting):
    rows = list(stream(160, kind))
    straight = learnt(kind(**SETTINGS[setting]), rows)
    for cut in (0, 1, 21, 150):
        moved = pickle.loads(pickle.dumps(learnt(kind(**SETTINGS[setting]), rows[:cut])))
        learnt(moved, rows[cut:])
        assert answer(moved, rows[0][0]) == answer(straight, rows[0][0])
        assert pickle.dumps(moved) == pickle.dumps(copy.deepcopy(moved))


@each(["default", "reset"])
def test_a_clone_of_a_learnt_model_is_fresh(kind, setting):
    rows = list(stream(40, kind))
    model = learnt(kind(**SETTINGS[setting]), rows)
    fresh = learnt(kind(**SETTINGS[setting]), rows[:20])
    assert answer(learnt(model.clone(), rows[:20]), rows[0][0]) == answer(fresh, rows[0][0])
    twin = model.clone(include_attributes=True)
    before = answer(model, rows[0][0])
    assert answer(twin, rows[0][0]) == before
    learnt(twin, rows)
    assert answer(model, rows[0][0]) == before


@each()
def test_predicting_changes_nothing(kind, setting):
    rows = list(stream(20, kind))
    model = learnt(kind(**SETTINGS[setting]), rows)
    before = pickle.dumps(model)
    answer(model, {**rows[0][0], "unheard of": "of any kind"})
    answer(model, {})
    answer(model, {"a": None, "b": math.nan, "c": math.inf, "d": 10**400})
    model.predict_many(pd.DataFrame([{"z": 1.0, "a": 2.0}]))
    assert pickle.dumps(model) == before
    assert answer(model, {**rows[0][0], "unheard of": 5.0}) == answer(model, rows[0][0])


@each()
def test_bad_values_do_not_poison(kind, setting):
    model = kind(**SETTINGS[setting])
    clean = kind(**SETTINGS[setting])
    rows = list(stream(60, kind))
    bad = iter([None, math.nan, math.inf, -math.inf, 1e300, np.float64("nan"), pd.NA])
    for i, (x, y) in enumerate(rows):
        if i % 9 == 3:
            x = {**x, "c": next(bad)}
        model.learn_one(x, y)
    assert model.values_missing == 7
    learnt(clean, rows)
    for name, value in answer(model, rows[0][0]).items():
        assert value == pytest.approx(answer(clean, rows[0][0])[name], rel=0.3, abs=0.3)


@pytest.mark.parametrize("bad", [None, math.nan, math.inf, -math.inf, pd.NA])
def test_a_missing_target_is_skipped_and_counted(bad):
    for kind in ESTIMATORS:
        model = learnt(kind(**SMALL), stream(10, kind))
        state = pickle.dumps(model._model)
        if kind is KalmanHeadMultiTargetRegressor:
            model.learn_one({"a": 1.0, "new": 2.0}, {"one": bad, "two": bad})
            assert model.targets_skipped == 2
        elif kind is KalmanHeadClassifier and isinstance(bad, float) and math.isinf(bad):
            continue
        else:
            model.learn_one({"a": 1.0, "new": 2.0}, bad)
            assert model.targets_skipped == 1
        assert pickle.dumps(model._model) == state


def test_some_targets_may_be_missing():
    model = KalmanHeadMultiTargetRegressor()
    for i, (x, y) in enumerate(stream(300, KalmanHeadMultiTargetRegressor)):
        model.learn_one(x, {"one": y["one"], "two": None if i % 2 else y["two"]})
        if i > 100:
            model.learn_one(x, {"three": y["one"] + 5})
    x, y = next(stream(1, KalmanHeadMultiTargetRegressor, seed=5))
    prediction = model.predict_one(x)
    assert list(prediction) == ["one", "two", "three"]
    assert prediction["one"] == pytest.approx(y["one"], abs=1.5)
    assert prediction["two"] == pytest.approx(y["two"], abs=150)
    assert prediction["three"] == pytest.approx(y["one"] + 5, abs=1.5)


@each(["default", "linear", "drift"])
def test_new_names_leave_what_was_learnt(kind, setting):
    rows = list(stream(64, kind))
    model = learnt(kind(**SETTINGS[setting]), rows)
    model._model.kernel.settle()
    probe = rows[5][0]
    before = (
        model.predict_proba_one(probe) if kind is KalmanHeadClassifier else answer(model, probe)
    )
    columns = dict(model._model.features)
    moments = _first_moment(model)
    model._model._make_room({*"abcd", "e", "aa", 3, True}, set())
    assert list(model._model.features)[:4] == list(columns)
    assert model._model.features["a"] == columns["a"]
    # Names of one row are sorted, whatever their types; the old ones keep their places.
    assert list(model._model.features)[4:] == [True, 3, "aa", "e"]
    assert_same(answer(model, probe), before)
    if moments is not None:
        grown = _first_moment(model)
        torch.testing.assert_close(grown[:, :4], moments)
        assert bool((grown[:, 4:] == 0).all())


def _first_moment(model):
    """What the optimiser knows of the first layer."""
    optimizer = model._model.learner.optimizer
    if optimizer is None:
        return None
    state = optimizer.state_dict()["state"][0]
    return state.get("exp_avg", state.get("momentum_buffer")).clone()


def test_p_is_widened_by_the_prior():
    model = KalmanHeadRegressor(**FAST, lam=4.0)
    learnt(model, stream(30))
    before = model._model.learner.head.groups[0].posterior.spread[0].clone()
    model._model._make_room({"e", "f"}, set())
    head = model._model.learner.head
    after = head.groups[0].posterior.spread[0]
    torch.testing.assert_close(after[:5, :5], before)
    expected = torch.eye(2, dtype=torch.float64) / (4 * head.power)
    torch.testing.assert_close(after[5:, 5:], expected)
    assert bool((after[:5, 5:] == 0).all())


def test_a_feature_that_comes_late_is_learnt():
    rng = np.random.default_rng(0)
    model = KalmanHeadRegressor()
    errors = []
    for i in range(400):
        x = {"z": rng.normal()}
        if i >= 100:
            x["a"] = rng.normal()
        y = x["z"] + 5 * x.get("a", 0.0)
        errors.append(abs(model.predict_one(x) - y))
        model.learn_one(x, y)
    assert np.mean(errors[300:]) < 0.3


def test_order_of_names_does_not_matter():
    rng = np.random.default_rng(1)
    one, other = KalmanHeadRegressor(**SMALL), KalmanHeadRegressor(**SMALL)
    for i, (x, y) in enumerate(stream(40, names=["b", "a", 2, "d"])):
        kept = {name: x[name] for name in list(x)[: 2 + i // 10]}
        names = list(kept)
        rng.shuffle(names)
        shuffled = {(int(n) if str(n).isdigit() else str(n)): 0 for n in names}
        shuffled = {name: kept[name] for name in shuffled}
        assert one.predict_one(kept) == other.predict_one(shuffled)
        one.learn_one(kept, y)
        other.learn_one(shuffled, y)


def test_before_any_learning():
    assert KalmanHeadRegressor().predict_one({"a": 1.0}) == 0.0
    assert KalmanHeadRegressor().predict_one({"a": 1.0}, with_dist=True).sigma > 0
    assert KalmanHeadMultiTargetRegressor().predict_one({"a": 1.0}) == {}
    assert KalmanHeadClassifier().predict_one({"a": 1.0}) is None
    assert KalmanHeadClassifier().predict_proba_one({"a": 1.0}) == {}
    frame = pd.DataFrame({"a": [1.0, 2.0]}, index=[5, 6])
    assert KalmanHeadRegressor().predict_many(frame).to_list() == [0.0, 0.0]
    assert KalmanHeadClassifier().predict_many(frame).index.to_list() == [5, 6]
    assert KalmanHeadMultiTargetRegressor().predict_many(frame).shape[1] == 0


def test_the_first_row_already_teaches():
    model = KalmanHeadRegressor()
    model.learn_one({"a": 1.0}, 50.0)
    assert model.predict_one({"a": 1.0}) == pytest.approx(50.0)


def test_a_row_without_features():
    model = KalmanHeadRegressor()
    for y in (4.0, 5.0, 6.0):
        model.learn_one({}, y)
    assert 4 <= model.predict_one({}) <= 6
    learnt(model, stream(20))
    assert list(model._model.features) == list("abcd")


@pytest.mark.parametrize("make", [pd.DataFrame, pa.Table.from_pandas], ids=["pandas", "pyarrow"])
@pytest.mark.parametrize("kind", ESTIMATORS)
def test_frames(kind, make):
    rows = list(stream(40, kind))
    frame = pd.DataFrame([x for x, _ in rows], index=range(100, 140))
    frame.iloc[3, 2] = np.nan
    targets = [y for _, y in rows]
    multi = kind is KalmanHeadMultiTargetRegressor
    y = pd.DataFrame(targets) if multi else pd.Series(targets)  # by position: its index is 0 to 39
    model = kind(**SMALL)
    if make is pd.DataFrame:
        model.learn_many(frame, y)
    else:
        model.learn_many(make(frame), pa.Table.from_pandas(y) if multi else pa.chunked_array([y]))
    assert model.values_missing == 1
    many = model.predict_many(make(frame))
    ones = [model.predict_one(x) for x, _ in rows]
    if make is pd.DataFrame:
        assert many.index.to_list() == list(range(100, 140))
        got = many.to_dict("records") if multi else many.to_list()
    else:
        got = many.to_pylist()
    for i, (value, one) in enumerate(zip(got, ones, strict=True)):
        if i != 3:
            assert value == (one if isinstance(one, str) else pytest.approx(one, rel=1e-6))
    if kind is KalmanHeadClassifier:
        table = model.predict_proba_many(make(frame))
        table = table if make is pd.DataFrame else table.to_pandas()
        assert set(table.columns) == {"low", "middle", "high"}
        np.testing.assert_allclose(table.sum(axis=1), 1)


def test_frames_of_many_types():
    model = KalmanHeadRegressor(**FAST)
    frame = pd.DataFrame(
        {
            "flag": [True, False, True],
            "whole": pd.array([1, None, 3], dtype="Int64"),
            "object": pd.Series([1.5, None, 2.5], dtype=object),
        }
    )
    model.learn_many(frame, pd.Series([1.0, 2.0, None]))
    assert (model.values_missing, model.targets_skipped) == (2, 1)
    table = pa.table({"flag": [True, None], "whole": [1, None]})
    model.learn_many(table, pa.chunked_array([[1.0, 2.0]]))
    assert model.values_missing == 4
    with pytest.raises(ConfigError, match="'name' is a str"):
        model.learn_many(pd.DataFrame({"name": ["3", "4"]}), [1.0, 2.0])
    with pytest.raises(ConfigError, match="X has 3 rows, y 2"):
        model.learn_many(frame, [1.0, 2.0])


@pytest.mark.parametrize("kind", ESTIMATORS)
def test_an_empty_batch_changes_nothing(kind):
    model = learnt(kind(**SMALL), stream(10, kind))
    before = pickle.dumps(model)
    empty = pd.DataFrame({"new": []})
    model.learn_many(empty, pd.DataFrame({"n": []}) if "Multi" in kind.__name__ else pd.Series([]))
    assert pickle.dumps(model) == before
    assert len(model.predict_many(empty)) == 0


@pytest.mark.parametrize("kind", ESTIMATORS)
def test_weights(kind):
    rows = list(stream(20, kind))
    model = learnt(kind(**SMALL), rows)
    before = pickle.dumps(model)
    model.learn_one({"new": 1.0}, rows[0][1], w=0)
    assert pickle.dumps(model) == before
    for bad in (-1, math.nan, math.inf, 1e30, "much"):
        with pytest.raises(ConfigError, match="weight from 0"):
            model.learn_one(*rows[0], w=bad)
    assert pickle.dumps(model) == before


def test_weight_two_is_the_row_twice():
    weighted = KalmanHeadRegressor(**FAST, lam=1e-3)
    twice = KalmanHeadRegressor(**FAST, lam=1e-3)
    for i, (x, y) in enumerate(stream(300)):
        weighted.learn_one(x, y, w=3 if i % 3 == 0 else 1)
        for _ in range(3 if i % 3 == 0 else 1):
            twice.learn_one(x, y)
    plain = learnt(KalmanHeadRegressor(**FAST, lam=1e-3), stream(300))
    x = {"a": 2.0, "b": 2.0, "c": 0.0, "d": 0.0}
    apart = abs(plain.predict_one(x) - twice.predict_one(x))
    assert abs(weighted.predict_one(x) - twice.predict_one(x)) < 0.02 * apart


def test_it_keeps_nothing_of_the_callers():
    model = KalmanHeadRegressor(**SMALL)
    x = {"a": 1.0, "b": 2.0}
    array = np.array([[1.0, 2.0], [3.0, 4.0]])
    model.learn_one(x, 1.0)
    model.learn_many(pd.DataFrame(array, columns=["a", "b"]), pd.Series([1.0, 2.0]))
    before = pickle.dumps(model)
    x["a"] = 99.0
    array[:] = 99.0
    assert pickle.dumps(model) == before


def test_what_is_absent():
    """A known name that is absent is its running mean, or zero, and counts as seen as such."""
    for absent, value in (("mean", 10.0), ("zero", 0.0)):
        model = KalmanHeadRegressor(**FAST, absent=absent)
        rng = np.random.default_rng(0)
        for _ in range(200):
            a = 10 + rng.normal()
            model.learn_one({"a": a, "b": 1.0}, 3 * a)
        here = model.predict_one({"a": value, "b": 1.0})
        assert model.predict_one({"b": 1.0}) == pytest.approx(here, rel=0.02, abs=0.5)
    sparse = KalmanHeadRegressor(**FAST, absent="zero")
    for i in range(200):
        sparse.learn_one({("odd" if i % 2 else "even"): 1}, 5.0 if i % 2 else 1.0)
    assert sparse.predict_one({"odd": 1}) == pytest.approx(5.0, abs=0.3)
    assert sparse.predict_one({"even": 1}) == pytest.approx(1.0, abs=0.3)


@pytest.mark.parametrize(
    "labels", [(False, True), (1, 2, 7), ("a", "b", "c"), (np.True_, np.False_)]
)
def test_labels_of_any_type(labels):
    model = KalmanHeadClassifier(**SMALL)
    rng = np.random.default_rng(0)
    for i in range(120):
        label = int(rng.integers(len(labels) if i > 40 else 2))
        x = {"a": label + 0.1 * rng.normal()}
        probabilities = model.predict_proba_one(x)
        assert not probabilities or math.isclose(sum(probabilities.values()), 1.0)
        model.learn_one(x, labels[label])
    assert set(model.predict_proba_one({"a": 0.0})) == set(labels)
    for i, label in enumerate(labels):
        got = model.predict_one({"a": float(i)})
        assert got == label
        assert type(got) is type(label.item() if isinstance(label, np.generic) else label)


def test_probabilities_are_calibrated():
    rng = np.random.default_rng(0)
    model = KalmanHeadClassifier(**FAST)
    said, came = [], []
    for _ in range(3000):
        x = {"a": rng.normal(), "b": rng.normal()}
        truth = 1 / (1 + math.exp(-2 * x["a"]))
        y = bool(rng.random() < truth)
        if len(model.predict_proba_one(x)) == 2:
            said.append(model.predict_proba_one(x)[True])
            came.append(y)
        model.learn_one(x, y)
    said, came = np.array(said[500:]), np.array(came[500:])
    for low, high in ((0, 0.2), (0.2, 0.4), (0.4, 0.6), (0.6, 0.8), (0.8, 1)):
        part = (said >= low) & (said < high)
        assert abs(said[part].mean() - came[part].mean()) < 0.08


def test_the_slope_finds_the_likeliest():
    rng = np.random.default_rng(0)
    slope = Slope()
    for _ in range(4000):
        means = rng.normal(size=3) * 0.3
        powers = np.exp(9 * means)
        slope.learn(means, int(rng.choice(3, p=powers / powers.sum())), 1.0)
    assert slope.slope == pytest.approx(9, rel=0.2)


def test_distributions_cover():
    model = KalmanHeadRegressor()
    inside = []
    for i, (x, y) in enumerate(stream(500)):
        dist = model.predict_one(x, with_dist=True)
        assert isinstance(dist, proba.Gaussian)
        assert dist.mu == pytest.approx(model.predict_one(x))
        if i > 100:
            inside.append(abs(y - dist.mu) < 1.645 * dist.sigma)
        model.learn_one(x, y)
    assert 0.8 < np.mean(inside) < 0.98


def test_at_home_in_river():
    rows = list(datasets.TrumpApproval().take(200))
    small = {"head": "reset", "width": 4}
    pipeline = preprocessing.StandardScaler() | KalmanHeadRegressor(**small)
    assert isinstance(pipeline, compose.Pipeline)
    assert evaluate.progressive_val_score(rows, pipeline, metrics.MAE()).get() < 2
    pipeline.learn_one(*rows[0], w=0.5)
    models = utils.expand_param_grid(
        KalmanHeadRegressor(**small), {"lr": [1e-3, 1e-2], "backbone_every": [2]}
    )
    assert [(m.lr, m.backbone_every) for m in models] == [(1e-3, 2), (1e-2, 2)]
    selector = model_selection.BanditRegressor(
        models, metrics.MAE(), policy=bandit.EpsilonGreedy(0.1, seed=0)
    )
    assert evaluate.progressive_val_score(rows, selector, metrics.MAE()).get() < 10
    chain = multioutput.RegressorChain(KalmanHeadRegressor(**small), order=["one", "two"])
    learnt(chain, stream(30, KalmanHeadMultiTargetRegressor))
    assert set(chain.predict_one({"a": 1.0})) == {"one", "two"}
    retrained = drift.DriftRetrainingClassifier(KalmanHeadClassifier(**small))
    learnt(retrained, datasets.Phishing().take(50))
    assert set(retrained.predict_proba_one(next(iter(datasets.Phishing()))[0])) == {True, False}


def test_mutate_takes_effect():
    model = KalmanHeadRegressor(**SMALL, lr=1e-2)
    rows = list(stream(40))
    learnt(model, rows[:20])
    model.mutate({"lr": 0.0, "backbone_every": 2, "clip": 1.0})
    before = {k: v.clone() for k, v in model._model.learner.backbone.state_dict().items()}
    learnt(model, rows[20:])
    torch.testing.assert_close(dict(model._model.learner.backbone.state_dict()), before)
    assert len(model._model.waiting) < 2
    with pytest.raises(ValueError, match="not a mutable attribute"):
        model.mutate({"width": 3})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"head": "nothing"}, "head 'nothing' is unknown"),
        ({"head": "reset", "eta": 0.1}, "eta is not for head reset"),
        ({"backbone": "fno"}, "choose mlp or linear"),
        ({"backbone_every": 0}, "backbone_every is 0"),
        ({"absent": "median"}, "choose mean or zero"),
        ({"lr": -1.0}, "learning rate"),
    ],
)
def test_bad_options_are_refused_at_once(options, message):
    with pytest.raises(ConfigError, match=message):
        KalmanHeadRegressor(**options)


def test_what_is_no_number_is_refused_by_name():
    model = learnt(KalmanHeadRegressor(**SMALL), stream(5))
    before = pickle.dumps(model)
    for bad in ("red", [1, 2], 1j):
        with pytest.raises(ConfigError, match="'colour' is a"):
            model.learn_one({"a": 1.0, "colour": bad}, 1.0)
    with pytest.raises(ConfigError, match="the target"):
        model.learn_one({"a": 1.0}, "red")
    assert pickle.dumps(model) == before


def test_parameters_are_plain():
    for kind in ESTIMATORS:
        for name, parameter in inspect.signature(kind).parameters.items():
            assert isinstance(parameter.default, (type(None), int, float, str)), name
            assert getattr(kind(), name) == parameter.default


def test_the_callers_modes_and_seeds_are_left_alone():
    rows = list(stream(20))
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    with torch.inference_mode():
        model = learnt(KalmanHeadRegressor(**SMALL), rows[:10])
    with torch.no_grad():
        learnt(model, rows[10:])
    assert torch.is_grad_enabled()
    torch.testing.assert_close(torch.rand(3), expected)
    assert answer(model, rows[0][0]) == answer(
        learnt(KalmanHeadRegressor(**SMALL), rows), rows[0][0]
    )


@pytest.mark.parametrize("setting", ["default", "drift", "linear"])
def test_long_streams_stay_finite_and_flat(setting):
    """An idle feature, one that is always zero and features of 1e4 +- 1."""
    rng = np.random.default_rng(0)
    model = KalmanHeadRegressor(**SETTINGS[setting])

    def rows(n):
        for _ in range(n):
            a, b = rng.normal(size=2)
            yield {"a": 1e4 + a, "b": 1e4 + b, "zero": 0.0}, 1e4 + a - 2 * b + 0.1 * rng.normal()

    model.learn_one({"a": 1e4, "b": 1e4, "zero": 0.0, "idle": 3.0}, 1e4)
    learnt(model, rows(600))
    tracemalloc.start()
    learnt(model, rows(200))
    first = tracemalloc.get_traced_memory()[0]
    learnt(model, rows(600))
    grown = tracemalloc.get_traced_memory()[0] - first
    tracemalloc.stop()
    assert grown < 50_000
    assert len(pickle.dumps(model)) < 500_000
    errors = [abs(model.predict_one(x) - y) for x, y in rows(50)]
    assert np.mean(errors) < 0.5
    covariances = [g.posterior.covariance for g in model._model.learner.head.groups]
    for covariance in covariances:
        assert bool((torch.linalg.eigvalsh(covariance) > 0).all())


def test_static_linear_is_bayesian_regression():
    """Against ridge on all rows, solved at once in the model's last scales."""
    model = KalmanHeadRegressor(**FAST, lam=1e-6)
    rows = list(stream(150))
    learnt(model, rows)
    x = np.array([[1.0, *row.values()] for row, _ in rows])
    w = np.linalg.lstsq(x, np.array([y for _, y in rows]), rcond=None)[0]
    probe = np.array([1.0, 0.5, -1.0, 2.0, 0.0])
    prediction = model.predict_one(dict(zip("abcd", probe[1:].tolist(), strict=True)))
    assert prediction == pytest.approx(float(probe @ w), rel=1e-3)


def test_it_beats_a_linear_model_where_the_truth_is_not_linear():
    rng = np.random.default_rng(0)
    ours = KalmanHeadRegressor()
    theirs = linear_model.BayesianLinearRegression()
    errors = []
    for _ in range(1500):
        x = {"a": rng.uniform(-2, 2), "b": rng.uniform(-2, 2)}
        y = math.sin(3 * x["a"]) + x["a"] * x["b"]
        errors.append([abs(m.predict_one(x) - y) for m in (ours, theirs)])
        for model in (ours, theirs):
            model.learn_one(x, y)
    a, b = np.mean(errors[-500:], axis=0)
    assert a < 0.5 * b


@pytest.mark.parametrize("kind", [KalmanHeadRegressor, KalmanHeadClassifier])
@pytest.mark.parametrize(
    ("row", "target", "options", "message"),
    [
        ([1, 2], 1, {}, r"x is a list \(\[1, 2\]\): give a dict of numbers by name"),
        (None, 1, {}, "x is a NoneType"),
        ({"a": 1.0}, 1, {"w": 10**400}, "w is 1000"),
        ({"a": 1.0}, 1, {"w": "heavy"}, "w is 'heavy'"),
    ],
)
def test_rows_and_weights_that_are_none_are_refused_in_one_line(
    kind, row, target, options, message
):
    model = kind()
    for i in range(20):
        model.learn_one({"a": float(i % 5)}, i % 2)
    before = pickle.dumps(model)
    with pytest.raises(ConfigError, match=message):
        model.learn_one(row, target, **options)
    assert pickle.dumps(model) == before


@pytest.mark.parametrize("label", [[1], {1: 2}, {1}, np.array([1.0, 2.0])])
def test_classes_that_are_no_keys_are_refused(label):
    model = KalmanHeadClassifier()
    with pytest.raises(ConfigError, match=r"y is a .*: give a class as a bool, str or int"):
        model.learn_one({"a": 1.0}, label)


@pytest.mark.parametrize("targets", [[1.0], None, 3.0])
def test_targets_that_have_no_names_are_refused(targets):
    with pytest.raises(ConfigError, match=r"y is a .*: give a dict of numbers by name"):
        KalmanHeadMultiTargetRegressor().learn_one({"a": 1.0}, targets)


def test_weights_of_any_kind_of_number_are_taken():
    models = [KalmanHeadClassifier() for _ in range(2)]
    for i in range(60):
        for model, weight in zip(models, (0.5, Decimal("0.5")), strict=True):
            model.learn_one({"a": float(i % 7)}, i % 3, w=weight)
    assert models[0].predict_proba_one({"a": 1.0}) == models[1].predict_proba_one({"a": 1.0})


@pytest.mark.parametrize("frame", [None, np.ones((2, 2)), {"a": [1.0]}])
def test_what_is_no_frame_is_refused(frame):
    model = KalmanHeadRegressor()
    for call in (lambda: model.learn_many(frame, [1.0, 2.0]), lambda: model.predict_many(frame)):
        with pytest.raises(ConfigError, match=r"cannot be read as rows .*: give a frame of pandas"):
            call()


def test_a_column_named_twice_is_refused():
    frame = pd.DataFrame([[1.0, 2.0]], columns=["a", "a"])
    with pytest.raises(ConfigError, match="each column under a name of its own"):
        KalmanHeadRegressor().learn_many(frame, [1.0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"width": 2.5}, "width is 2.5: give a whole number"),
        ({"width": "wide"}, "width is 'wide': give a whole number"),
        ({"width": True}, "width is True: give a whole number"),
        ({"width": 10**9}, "width is 1000000000: give 1 to 65536"),
        ({"depth": 1.0}, "depth is 1.0: give a whole number or None"),
        ({"seed": "s"}, "seed is 's': give a whole number"),
        ({"seed": 2**70}, "seed is .*: give 0 to"),
        ({"seed": -(2**64)}, "seed is .*: give 0 to"),
        ({"head": "reset", "lam": 1e-13}, "lam is 1e-13: give 1e-12 to"),
        ({"head": "reset", "lam": 10**400}, "lam is 1000.*: give a number or None"),
        ({"width": np.zeros((3, 3))}, r"width is array\(\[\[0., 0., 0.\], \[0"),
        ({"clip": "x"}, "clip is 'x': give a number or None"),
        ({"average": "x"}, "average is 'x': give a number or None"),
        ({"skip": "no"}, "skip is 'no': give True or False or None"),
        ({"lr": 1e300}, r"lr is 1e\+300: give a learning rate from 0 to 1e\+30"),
    ],
)
def test_options_of_another_kind_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        KalmanHeadRegressor(**options).learn_one({"a": 1.0}, 2.0)


def test_a_rate_that_is_mutated_is_checked():
    model = KalmanHeadRegressor()
    model.learn_one({"a": 1.0}, 2.0)
    model.mutate({"lr": 1e300})
    with pytest.raises(ConfigError, match="learning rate from 0 to"):
        model.learn_one({"a": 1.0}, 2.0)


def test_large_values_raise_no_warning():
    model = KalmanHeadRegressor()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for i in range(20):
            model.learn_one({"a": 1e308 if i == 10 else float(i)}, float(i))
            assert math.isfinite(model.predict_one({"a": 1e308}))
    assert model.values_missing == 1


def test_a_row_that_makes_up_values_is_left_as_it_is():
    model = KalmanHeadRegressor()
    for i in range(10):
        model.learn_one({"a": float(i), "b": 1.0}, float(i))
    row = defaultdict(float, c=1.0, d=2.0)
    model.predict_one(row)
    model.learn_one(row, 1.0)
    assert dict(row) == {"c": 1.0, "d": 2.0}


def rectified(scale, rows=1000, **options):
    """Mean error and median sigma over the later rows, in units of the target's scale."""
    model, rng, late = KalmanHeadRegressor(**options), np.random.default_rng(0), []
    for i in range(rows):
        a = float(rng.normal())
        y = scale * max(a, 0.0)
        if i > rows // 2:
            told = model.predict_one({"a": a}, with_dist=True)
            late.append((abs(told.mu - y) / scale, told.sigma / scale))
        model.learn_one({"a": a}, y)
    return np.mean([error for error, _ in late]), np.median([sigma for _, sigma in late])


@pytest.mark.parametrize("options", [{}, {"head": "drift"}])
@pytest.mark.parametrize("scale", [1e-3, 1e-12, 1e9])
def test_units_of_the_target_do_not_matter(scale, options):
    np.testing.assert_allclose(rectified(scale, **options), rectified(1.0, **options), rtol=0.1)


def test_a_target_that_begins_to_move_late_is_learnt_in_its_unit():
    model, rng, errors = KalmanHeadRegressor(), np.random.default_rng(0), []
    for i in range(900):
        a = float(rng.normal())
        y = 5 + (1e-6 * a if i >= 300 else 0.0)
        if i > 700:
            told = model.predict_one({"a": a}, with_dist=True)
            errors.append((abs(told.mu - y) / 1e-6, told.sigma / 1e-6))
        model.learn_one({"a": a}, y)
    assert np.mean([error for error, _ in errors]) < 0.1
    assert np.median([sigma for _, sigma in errors]) < 0.5


CHANGES = {
    "law": lambda x, y, _: (x, -3 * x["a"] + x["b"] + 20),
    "feature": lambda x, y, new: ({**x, "c": 100 + new}, y + 5 * new),
    "level": lambda x, y, _: (x, y + 1000),
}


def late_errors(change, rows=4000, after=120):
    """Errors row by row after a change that comes once the model has long been settled."""
    model, rng, errors = KalmanHeadRegressor(width=8), np.random.default_rng(0), []
    for i in range(rows + after):
        x = {"a": float(rng.normal()), "b": float(rng.normal())}
        y = 2 * x["a"] - x["b"] + 0.1 * float(rng.normal())
        if i >= rows:
            x, y = change(x, y, float(rng.normal()))
            errors.append(abs(model.predict_one(x) - y))
        model.learn_one(x, y)
    return np.array(errors)


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_followed_as_if_each_row_had_been_settled(change, monkeypatch):
    ours = late_errors(CHANGES[change])
    monkeypatch.setattr(row_kernel, "MOST_PENDING", 1)
    at_once = late_errors(CHANGES[change])
    assert at_once[:10].mean() > 2 * at_once[60:].mean()  # it is one
    for part in (slice(25, 50), slice(50, 120)):  # three rows late at most, and their aftermath
        assert ours[part].mean() < 1.3 * at_once[part].mean() + 0.1


def test_a_class_that_comes_late_is_learnt_as_if_each_row_had_been_settled(monkeypatch):
    def accuracy():
        model, rng, right = KalmanHeadClassifier(width=8), np.random.default_rng(0), []
        for i in range(3100):
            label = "two" if i >= 3000 and i % 2 else "one"
            x = {"a": float(rng.normal()) + (4 if label == "two" else 0), "b": float(rng.normal())}
            right.append(model.predict_one(x) == label)
            model.learn_one(x, label)
        return np.mean(right[3000:])

    ours = accuracy()
    monkeypatch.setattr(row_kernel, "MOST_PENDING", 1)
    assert ours > accuracy() - 0.05


@pytest.mark.parametrize("failure", [KeyboardInterrupt, MemoryError])
def test_growth_that_fails_leaves_the_model_as_it_was(failure, monkeypatch):
    model = KalmanHeadRegressor(width=4)
    for i in range(50):
        model.learn_one({"a": float(i % 7), "b": 1.0}, float(i % 5))
    twin = copy.deepcopy(model)

    def fail(*_):
        raise failure

    with monkeypatch.context() as patch:
        patch.setattr(row_model, "grown", fail)
        expected = KeyboardInterrupt if failure is KeyboardInterrupt else ConfigError
        with pytest.raises(expected) as caught:
            model.learn_one({"a": 1.0, "b": 1.0, "c": 2.0}, 1.0)
    if failure is MemoryError:
        assert "3 features and 1 outputs do not fit the memory" in str(caught.value)
    twin._model.kernel.settle()  # as growing had begun with
    for i in range(60):
        x = {"a": float(i % 7), "b": float(i % 3), **({"c": 1.0} if i > 30 else {})}
        assert model.predict_one(x) == twin.predict_one(x)
        model.learn_one(x, float(i % 5))
        twin.learn_one(x, float(i % 5))


def test_a_buffer_that_is_used_again_gives_its_values_of_now():
    model, plain = KalmanHeadRegressor(width=4), KalmanHeadRegressor(width=4)
    rng, buffer = np.random.default_rng(0), np.array(1.0)
    for _ in range(50):
        buffer[...] = rng.normal()
        model.learn_one({"a": buffer}, 3 * float(buffer))
        plain.learn_one({"a": float(buffer)}, 3 * float(buffer))
    assert model.predict_one({"a": 2.0}) == plain.predict_one({"a": 2.0})
    plain.predict_one({"a": 1e10})
    assert plain.predict_one({"a": np.float16("inf")}) == plain.predict_one({"a": math.inf})


def test_a_row_that_was_predicted_before_a_name_came_is_read_anew():
    model = KalmanHeadRegressor(width=4)
    a, b = 1.5, 2.5
    for i in range(20):
        model.learn_one({"a": a * i, "b": b}, float(i))
    model.predict_one({"a": a, "b": b})
    model.learn_one({"a": a, "b": b, "c": 3.0}, 1.0)
    twin = pickle.loads(pickle.dumps(model))
    row = {"a": a, "b": b, "c": 4.0}
    assert model.predict_one(row) == twin.predict_one(dict(row))


def test_no_targets_teach_nothing():
    model = KalmanHeadMultiTargetRegressor()
    model.learn_one({"a": 1.0}, {})
    assert model.predict_one({"a": 1.0}) == {}
    for i in range(100):
        model.learn_one({"a": float(i % 7)}, {"one": float(i % 7)})
    before = pickle.dumps(model)
    for _ in range(50):
        model.learn_one({"a": 1.0}, {})
    assert pickle.dumps(model) == before


@pytest.mark.parametrize(
    "make", [np.array, pd.Series, pd.Index, pa.array, list, tuple, lambda v: pd.DataFrame({"y": v})]
)
def test_targets_and_weights_come_in_any_kind_of_list(make):
    frame, y, w = pd.DataFrame({"a": [1.0, 2.0, 4.0]}), [1.0, 3.0, 2.0], [1.0, 2.0, 0.5]
    plain, other = KalmanHeadRegressor(), KalmanHeadRegressor()
    plain.learn_many(frame, y, w=w)
    other.learn_many(frame, make(y), w=make(w))
    assert plain.predict_one({"a": 3.0}) == other.predict_one({"a": 3.0})


@pytest.mark.parametrize(
    ("y", "w", "message"),
    [
        (None, 1.0, "y is a NoneType: give a list"),
        ({1.0, 2.0}, 1.0, "y is a set"),
        ({"a": 1}, 1.0, "y is a dict"),
        ("ab", 1.0, "y is a str"),
        (np.array(1.0), 1.0, "y is a ndarray"),
        (np.ones((2, 1)), 1.0, "y is a ndarray"),
        (iter([1.0, 2.0]), 1.0, "y is a list_iterator"),
        ([1.0, 2.0], None, "w is None: give a weight"),
        ([1.0, 2.0], "x", "w is 'x': give a weight"),
        ([1.0, 2.0], ["x", 1], "w is 'x': give a weight"),
        ([1.0, 2.0], [10**400, 1], "w is 1000"),
        ([1.0, 2.0], {1.0, 2.0}, "w is a set"),
        ([1.0, 2.0], [1.0], r"X has 2 rows, y 2 and w 1"),
    ],
)
def test_what_is_no_list_of_targets_or_weights_is_refused(y, w, message):
    model = KalmanHeadRegressor()
    with pytest.raises(ConfigError, match=message):
        model.learn_many(pd.DataFrame({"a": [1.0, 2.0]}), y, w=w)
    assert model.predict_one({"a": 1.0}) == 0.0


def test_a_frame_with_a_bad_label_teaches_nothing():
    model = KalmanHeadClassifier()
    with pytest.raises(ConfigError, match="give a class"):
        model.learn_many(pd.DataFrame({"a": [1.0, 2.0]}), ["p", [1]])
    assert model.predict_proba_one({"a": 1.0}) == {}


@pytest.mark.parametrize(
    "options",
    [{"clip": "x"}, {"clip": -1.0}, {"backbone_every": "x"}, {"backbone_every": 0},
     {"backbone_every": True}, {"lr": -1.0}],
)  # fmt: skip
def test_mutated_options_are_checked_before_anything_changes(options):
    model = KalmanHeadRegressor(width=4)
    for i in range(13):
        model.learn_one({"a": float(i)}, float(i))
    model.mutate(options)
    before = model.predict_one({"a": 1.0})
    with pytest.raises(ConfigError, match=next(iter(options))):
        model.learn_one({"a": 1.0}, 1.0)
    assert model.predict_one({"a": 1.0}) == before


def test_tables_without_columns_are_rows_of_which_nothing_is_known():
    model = KalmanHeadRegressor()
    model.learn_many(pa.table({"a": [1.0, 2.0]}), [1.0, 2.0])
    empty = pa.table({"a": [1.0, 2.0]}).select([])
    assert len(model.predict_many(empty)) == len(empty)


@pytest.mark.parametrize(
    "value",
    [
        np.datetime64("2020-01-01"),
        np.datetime64("2020-01-01", "ns"),
        np.timedelta64(3, "s"),
        np.complex128(1 + 2j),
        np.zeros((3, 3)),
        "text",
    ],
)
def test_what_would_only_look_like_a_number_is_refused(value):
    model = KalmanHeadMultiTargetRegressor(width=4)
    model.learn_one({"a": 1.0}, {"t": 1.0})
    with pytest.raises(ConfigError, match=r"^'a' is a .*: give (a )?number") as caught:
        model.learn_one({"a": value}, {"t": 1.0, "u": None})
    assert "\n" not in str(caught.value)
    assert model.targets_skipped == 0


@pytest.mark.parametrize(
    "wrap", [pa.scalar, torch.tensor, np.float64, np.array, Decimal], ids=lambda wrap: wrap.__name__
)
def test_scalars_of_other_libraries_are_plain_values(wrap):
    ours, theirs = KalmanHeadRegressor(width=4), KalmanHeadRegressor(width=4)
    for i in range(20):
        ours.learn_one({"a": float(i % 5)}, 0.5 * i)
        theirs.learn_one({"a": wrap(float(i % 5))}, wrap(0.5 * i))
    assert ours.predict_one({"a": 2.0}) == theirs.predict_one({"a": wrap(2.0)})


def test_classes_are_plain_values():
    model = KalmanHeadClassifier(width=4)
    for wrap in (int, np.int64, torch.tensor, pa.scalar) * 3:
        for label in (1, 2):
            model.learn_one({"a": float(label)}, wrap(label))
    assert list(model.predict_proba_one({"a": 1.0})) == [1, 2]
    model.learn_one({"a": 1.0}, pa.scalar(None))
    assert model.targets_skipped == 1


def test_missing_in_any_library_is_missing():
    model = KalmanHeadRegressor(width=4)
    missing = [pa.scalar(None), Decimal("sNaN"), Decimal("NaN"), np.float32("nan"), pd.NA, None]
    model.learn_one({"a": 1.0}, 1.0)
    for value in missing:
        model.learn_one({"a": value}, 1.0)
        model.learn_one({"a": 1.0}, value)
    assert model.values_missing == model.targets_skipped == len(missing)


def test_a_name_that_equals_no_name_is_refused():
    model = KalmanHeadMultiTargetRegressor(width=4)
    for x, y in (({math.nan: 1.0}, {"t": 1.0}), ({"a": 1.0}, {math.nan: 1.0})):
        with pytest.raises(ConfigError, match="named NaN"):
            model.learn_one(x, y)
    assert model.predict_one({"a": 1.0}) == {}


def test_a_target_of_which_no_value_has_come_is_not_predicted():
    model = KalmanHeadMultiTargetRegressor(width=4)
    model.learn_one({"a": 1.0}, {"t": 1.0, "u": None})
    assert list(model.predict_one({"a": 1.0})) == ["t"]
    model.learn_one({"a": 1.0}, {"t": 1.0, "u": 2.0})
    assert list(model.predict_one({"a": 1.0})) == ["t", "u"]


def test_columns_that_were_never_learnt_may_hold_anything():
    model = KalmanHeadRegressor(width=4)
    for i in range(20):
        model.learn_one({"a": float(i % 5)}, float(i % 5))
    plain = model.predict_many(pd.DataFrame({"a": [1.0, 2.0]}))
    mixed = model.predict_many(pd.DataFrame({"name": ["x", "y"], "a": [1.0, 2.0]}))
    assert plain.tolist() == mixed.tolist()


def test_names_that_are_the_same_as_text_are_refused_where_text_is_all_there_is():
    model = KalmanHeadClassifier(width=4)
    for i in range(6):
        model.learn_one({"a": float(i % 2)}, (1, "1")[i % 2])
    assert list(model.predict_proba_many(pd.DataFrame({"a": [1.0]})).columns) == [1, "1"]
    with pytest.raises(ConfigError, match="two columns of the answer would be named '1'"):
        model.predict_proba_many(pa.table({"a": [1.0]}))


def test_options_may_be_numbers_of_numpy():
    options = {"width": 8, "seed": 3, "lr": 0.01, "skip": True, "backbone_every": 4}
    kinds = (np.int64, np.int32, np.float64, np.bool_, np.int64)
    theirs = {name: kind(value) for (name, value), kind in zip(options.items(), kinds, strict=True)}
    models = [KalmanHeadRegressor(**options), KalmanHeadRegressor(**theirs).clone()]
    for i in range(40):
        for model in models:
            model.learn_one({"a": float(i % 5)}, float(i % 7))
    ours, others = (model.predict_one({"a": 2.0}) for model in models)
    assert ours == others


@pytest.mark.parametrize("device", ["meta"])
def test_a_default_device_of_the_callers_does_not_matter(device):
    before = torch.get_default_device()
    said = []
    for default in (before, device):
        torch.set_default_device(default)
        try:
            model = KalmanHeadRegressor(width=8)
            for i in range(60):
                model.learn_one({"a": float(i % 5)}, float(i % 7))
            again = pickle.loads(pickle.dumps(model))
            again.learn_one({"a": 1.0, "b": 2.0}, 3.0)
            mean = again.predict_one({"a": 2.0}, with_dist=True).mu
            said.append((model.predict_one({"a": 2.0}), mean))
        finally:
            torch.set_default_device(before)
    assert said[0] == said[1]


def test_a_default_dtype_of_16_bits_does_not_matter_to_what_is_learnt():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = KalmanHeadRegressor(width=8)
        for i in range(3000):
            model.learn_one({"a": float(i % 5)}, 2.0 * (i % 5))
    finally:
        torch.set_default_dtype(before)
    assert abs(model.predict_one({"a": 2.0}) - 4.0) < 0.02


def test_a_rate_out_of_range_is_named():
    with pytest.raises(ConfigError, match="eta is 5: give 0 to 1"):
        KalmanHeadRegressor(head="drift", eta=5)


def test_a_target_that_is_a_class_is_told_where_classes_are_learnt():
    with pytest.raises(ConfigError, match="KalmanHeadClassifier for classes"):
        KalmanHeadRegressor().learn_one({"a": 1.0}, "cat")
    with pytest.raises(ConfigError, match="OneHotEncoder"):
        KalmanHeadRegressor().learn_one({"a": "cat"}, 1.0)


def test_targets_may_be_a_frame_of_one_column_whatever_its_name():
    frame, y = pd.DataFrame({"a": [1.0, 2.0, 3.0]}), pd.Series([2.0, 4.0, 6.0])
    ours, theirs = KalmanHeadRegressor(width=4), KalmanHeadRegressor(width=4)
    ours.learn_many(frame, y.to_frame())
    theirs.learn_many(frame, y)
    assert ours.predict_one({"a": 2.0}) == theirs.predict_one({"a": 2.0})


def test_one_bool_tells_of_the_other():
    model = KalmanHeadClassifier(width=4)
    for _ in range(3):
        model.learn_one({"a": 1.0}, True)
    assert model.predict_proba_one({"a": 1.0}) == {True: pytest.approx(0.8), False: 0.2}
    many = model.predict_proba_many(pd.DataFrame({"a": [1.0, 2.0]}))
    assert many[True].tolist() == pytest.approx([0.8, 0.8])
    assert model.predict_one({"a": 1.0}) is True
    other = KalmanHeadClassifier(width=4)
    other.learn_one({"a": 1.0}, "spam")
    assert other.predict_proba_one({"a": 1.0}) == {"spam": 1.0}
