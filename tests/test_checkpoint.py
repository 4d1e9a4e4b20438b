"""Checkpoints: exact round trips, no damage unseen, no half-written file."""

import errno
import json
import math
import os
import pickle
import random
import shutil

import command
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from kalmanhead import checkpoint
from kalmanhead.checkpoint import CheckpointFolder, load, save
from kalmanhead.config import ModelConfig, build_learner
from kalmanhead.errors import CheckpointError, ConfigError

TREE = {
    "weights": torch.arange(6.0).reshape(2, 3),
    "moments": {0: {"step": 3, "mean": torch.ones(4, dtype=torch.float64)}, 1: {}},
    "rng": torch.get_rng_state(),
    "losses": [0.1, -0.0, math.inf, -math.inf, math.nan],
    "betas": (0.9, 0.999),
    "name": 'ünï\ud800 "quoted" \\ \n',
    "flags": [True, False, None, [], (), {}],
    "seed": 2**128 + 1,
}


def same(a, b):
    """Equal in structure, types and bits."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b))
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, float):
        return repr(a) == repr(b)
    return a == b


def bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "state.safetensors"
    save(path, TREE, kind="test")
    return path


def test_round_trip_is_exact(file):
    assert same(load(file), TREE)
    assert same(load(file, kind="test"), TREE)


def test_same_tree_gives_same_bytes(file, tmp_path):
    save(tmp_path / "again", TREE, kind="test")
    assert (tmp_path / "again").read_bytes() == file.read_bytes()


DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.bool,
    torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint64, torch.uint32, torch.uint16, torch.uint8,
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (5,), (2, 3)], ids=str)
def test_tensors_of_all_kinds(tmp_path, dtype, shape):
    tensor = torch.ones(shape).to(dtype)
    save(tmp_path / "a", tensor, kind="test")
    assert same(load(tmp_path / "a"), tensor)


def test_views_parameters_and_clashing_paths(tmp_path):
    base = torch.arange(12.0).reshape(3, 4)
    tree = {
        "whole": base, "row": base[1], "transposed": base.T, "expanded": base[0].expand(2, 4),
        "conjugate": torch.tensor([1 + 2j], dtype=torch.complex64).conj(),
        0: torch.zeros(1), "0": torch.ones(1), "a/b": torch.ones(2), "a": {"b": torch.zeros(2)},
        "__metadata__": torch.ones(3), "é\ud800": torch.ones(1), "": torch.zeros(1),
    }  # fmt: skip
    save(tmp_path / "a", tree, kind="test")
    back = load(tmp_path / "a")
    assert list(back) == list(tree)
    for key in tree:
        torch.testing.assert_close(back[key], tree[key], rtol=0, atol=0)
    parameter = torch.nn.Parameter(torch.ones(2))
    save(tmp_path / "p", parameter, kind="test")
    assert type(load(tmp_path / "p")) is torch.Tensor


def test_numpy_scalars_become_plain_and_arrays_stay(tmp_path):
    tree = {
        "f": np.float32(0.1), "d": np.float64(0.1), "i": np.int64(3), "b": np.bool_(True),
        "array": np.arange(4, dtype=">i4"), "bits": np.arange(3, dtype=np.uint64),
        np.int64(7): "key",
    }  # fmt: skip
    save(tmp_path / "a", tree, kind="test")
    back = load(tmp_path / "a")
    assert same(back["f"], float(np.float32(0.1)))
    assert (type(back["d"]), type(back["i"]), type(back["b"])) == (float, int, bool)
    assert back[7] == "key"
    np.testing.assert_array_equal(back["array"], [0, 1, 2, 3])
    assert back["bits"].dtype == np.uint64


@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.SGD])
def test_an_optimizer_goes_on_bit_for_bit(tmp_path, optimizer):
    def steps(model, optim, count):
        for i in range(count):
            optim.zero_grad()
            model(torch.full((2, 3), 0.1 * i)).square().sum().backward()
            optim.step()

    first = torch.nn.Linear(3, 1)
    optim = optimizer(first.parameters(), lr=0.01)
    steps(first, optim, 3)
    save(tmp_path / "a", {"model": first.state_dict(), "optim": optim.state_dict()}, kind="t")
    steps(first, optim, 3)
    second = torch.nn.Linear(3, 1)
    again = optimizer(second.parameters(), lr=0.5)
    state = load(tmp_path / "a")
    second.load_state_dict(state["model"])
    again.load_state_dict(state["optim"])
    steps(second, again, 3)
    assert torch.equal(first.weight, second.weight)


LEAVES = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text()
    | st.lists(st.integers(0, 255), max_size=5).map(lambda v: torch.tensor(v, dtype=torch.uint8))
    | st.lists(st.floats(), max_size=5).map(lambda v: torch.tensor(v, dtype=torch.float64))
    | st.lists(st.floats(), max_size=5).map(lambda v: np.array(v, dtype=np.float64))
)  # fmt: skip
KEYS = st.text(max_size=5) | st.integers(-5, 5)
TREES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=4)
    ),
    max_leaves=12,
)


@given(TREES)
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_any_tree_round_trips(tmp_path, tree):
    save(tmp_path / "a", tree, kind="test")
    assert same(load(tmp_path / "a"), tree)


def test_loaded_tensors_own_aligned_memory(file):
    weights = load(file)["weights"]
    assert weights.data_ptr() % 64 == 0
    file.write_bytes(b"gone")
    weights += 1
    torch.testing.assert_close(weights, TREE["weights"] + 1)


@pytest.mark.parametrize(
    ("tree", "match"),
    [
        ({"a": [1, {2, 3}]}, "set at a/1"),
        ({"a": 1j}, "complex at a"),
        (object(), "object at the root"),
        ({(1, 2): 3}, r"key \(1, 2\)"),
        ({True: 3}, "key True"),
        ({"a": np.array(["x"])}, "array of <U1 at a"),
        ({"a": np.array([object()])}, "array of object at a"),
        ({"a": torch.ones(2, dtype=torch.complex128)}, "complex128"),
        ({"a": torch.eye(2).to_sparse()}, "sparse"),
    ],
)
def test_what_has_no_plain_form_is_refused(tmp_path, tree, match):
    with pytest.raises(TypeError, match=match):
        save(tmp_path / "a", tree, kind="test")
    assert list(tmp_path.iterdir()) == []


def expect_refusal(path, match="damaged"):
    with pytest.raises(CheckpointError, match=match) as caught:
        load(path)
    message = str(caught.value)
    assert "\n" not in message
    assert str(path) in message


def test_every_flipped_byte_is_found(file):
    good = file.read_bytes()
    rng = random.Random(1)
    places = [*range(8), *(rng.randrange(len(good)) for _ in range(300))]
    for place in places:
        bad = bytearray(good)
        bad[place] ^= rng.randrange(1, 256)
        file.write_bytes(bad)
        with pytest.raises(CheckpointError):
            load(file)


def test_every_flipped_bit_of_a_small_file_is_found(tmp_path):
    path = tmp_path / "a"
    save(path, {"a": torch.ones(2), "n": 1}, kind="t")
    good = path.read_bytes()
    for place in range(len(good)):
        bad = bytearray(good)
        bad[place] ^= 1 << (place % 8)
        path.write_bytes(bad)
        with pytest.raises(CheckpointError):
            load(path)


def test_truncations_and_additions_are_found(file):
    good = file.read_bytes()
    rng = random.Random(2)
    for length in [0, 1, 7, 8, 9, *(rng.randrange(len(good)) for _ in range(300))]:
        file.write_bytes(good[:length])
        expect_refusal(file)
    for more in (b"\0", b"x" * 100, good):
        file.write_bytes(good + more)
        expect_refusal(file)


def forge(path, header, data=b""):
    """A file whose digest is right, as someone who means harm would write it."""
    raw = json.dumps(header, separators=(",", ":")).encode()
    blob = bytearray(len(raw).to_bytes(8, "little") + raw + data)
    place = checkpoint._digest_place(blob)
    blob[place] = checkpoint._digest(blob, place)
    path.write_bytes(blob)


def forged_header(manifest, version=1, **tensors):
    text = f"{version} {'0' * 64} {manifest}"
    return {"__metadata__": {"kalmanhead": text}, **tensors}


HUGE = {"dtype": "F64", "shape": [2**40], "data_offsets": [0, 2**43]}
WRAPS = {"dtype": "F64", "shape": [2**62, 4], "data_offsets": [0, 0]}
SHORT = {"dtype": "F64", "shape": [1], "data_offsets": [0, 4]}


@pytest.mark.parametrize(
    "header",
    [
        forged_header('{"kind":"test","tree":{"tensor":"a"}}', a=HUGE),
        forged_header('{"kind":"test","tree":{"tensor":"a"}}', a=WRAPS),
        forged_header('{"kind":"test","tree":{"tensor":"a"}}', a=SHORT),
        forged_header('{"kind":"test","tree":{"tensor":"absent"}}'),
        forged_header('{"kind":"test","tree":{"run":"rm"}}'),
        forged_header('{"kind":"test","tree":{"dict":[[[],1]]}}'),
        forged_header('{"kind":"test","tree":{"dict":3}}'),
        forged_header('{"kind":"test","tree":{}}'),
        forged_header('{"kind":"test"}'),
        forged_header("[]"),
        forged_header('"text"'),
        forged_header("[" * 100_000),
        forged_header("1" * 5_000),
    ],
    ids=range(13),
)
def test_forged_files_are_refused(tmp_path, header):
    forge(tmp_path / "a", header)
    expect_refusal(tmp_path / "a", "cannot be decoded")


def test_huge_declared_header_is_refused(file):
    good = file.read_bytes()
    file.write_bytes((2**62).to_bytes(8, "little") + good[8:])
    expect_refusal(file)


def test_other_formats_are_named(tmp_path):
    path = tmp_path / "a"
    forge(path, forged_header('{"kind":"test","tree":1}', version=2))
    expect_refusal(path, "checkpoint format 2, .* reads format 1")
    path.write_bytes(pickle.dumps({"a": 1}))
    expect_refusal(path, "a pickle .* never loaded")
    torch.save({"a": torch.ones(2)}, path)
    expect_refusal(path, "a pickle .* never loaded")
    save_file({"a": torch.ones(2)}, path)
    expect_refusal(path, "damaged or foreign")
    expect_refusal(tmp_path / "absent", "no such checkpoint")
    expect_refusal(tmp_path, "cannot be read")


def test_another_kind_is_refused(file):
    with pytest.raises(CheckpointError, match="kind 'test' where 'run' is needed"):
        load(file, kind="run")


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read all")
def test_permission(file):
    file.chmod(0)
    expect_refusal(file, "cannot be read")


def test_missing_folder(tmp_path):
    with pytest.raises(CheckpointError, match="cannot be written: No such file"):
        save(tmp_path / "absent" / "a", 1, kind="test")


@pytest.mark.parametrize("function", ["fsync", "replace"])
@pytest.mark.parametrize("failure", [OSError(errno.ENOSPC, "No space left"), KeyboardInterrupt()])
def test_failed_write_leaves_the_old_file_whole(file, monkeypatch, function, failure):
    before = file.read_bytes()

    def fail(*args):
        raise failure

    monkeypatch.setattr(checkpoint.os, function, fail)
    expected = CheckpointError if isinstance(failure, OSError) else KeyboardInterrupt
    with pytest.raises(
        expected, match="No space left; free" if expected is not type(failure) else None
    ):
        save(file, {"new": 1}, kind="test")
    monkeypatch.undo()
    assert file.read_bytes() == before
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_folder_without_fsync_is_no_failure(file, monkeypatch):
    real = os.fsync

    def fsync(handle):
        if os.path.isdir(f"/proc/self/fd/{handle}"):
            raise OSError(errno.EINVAL, "Invalid argument")
        real(handle)

    monkeypatch.setattr(checkpoint.os, "fsync", fsync)
    save(file, {"new": 1}, kind="test")
    assert load(file) == {"new": 1}


class TestFolder:
    def test_rotation_and_names(self, tmp_path):
        folder = CheckpointFolder(tmp_path / "checkpoints", keep=3)
        for index in (0, 9, 10, 200, 1200):
            folder.write({"index": index}, index)
        names = sorted(path.name for path in folder.folder.iterdir())
        assert names == [f"batch-{i:012d}.safetensors" for i in (10, 200, 1200)]
        found = folder.latest()
        assert (found.tree, found.index, found.passed_over) == ({"index": 1200}, 1200, [])

    def test_order_holds_beyond_twelve_digits(self, tmp_path):
        folder = CheckpointFolder(tmp_path, keep=2)
        for index in (5, 10**12 - 1, 10**12):
            folder.write(index, index)
        assert folder.latest().tree == 10**12

    def test_damaged_ones_are_passed_over(self, tmp_path):
        folder = CheckpointFolder(tmp_path, keep=3)
        one, two, three = (folder.write(index, index) for index in (1, 2, 3))
        three.write_bytes(three.read_bytes()[:-3])
        two.write_bytes(b"")
        found = folder.latest()
        assert (found.tree, found.path) == (1, one)
        assert [str(p) in m for p, m in zip((three, two), found.passed_over, strict=True)] == [
            True, True,
        ]  # fmt: skip
        one.unlink()
        with pytest.raises(CheckpointError, match="none of 2 checkpoints is sound"):
            folder.latest()

    def test_going_on_from_before_a_damaged_one(self, tmp_path):
        folder = CheckpointFolder(tmp_path, keep=2)
        for index in (800, 1200):
            path = folder.write(index, index)
        path.write_bytes(b"damaged")
        assert folder.latest().tree == 800
        folder.write(900, 900)
        found = folder.latest()
        assert (found.tree, found.passed_over) == (900, [])
        assert [path.name for path in folder.folder.glob("*.stale")] == [f"{path.name}.stale"]

    def test_nothing_there(self, tmp_path):
        for path in (tmp_path, tmp_path / "absent"):
            with pytest.raises(CheckpointError, match="holds no checkpoint"):
                CheckpointFolder(path).latest()

    def test_leftovers_and_strangers(self, tmp_path):
        (tmp_path / ".batch-000000000009.safetensors.0123abcd.tmp").write_bytes(b"half")
        (tmp_path / "batch-9.safetensors").write_bytes(b"")
        (tmp_path / "notes.txt").write_text("mine")
        folder = CheckpointFolder(tmp_path, keep=1)
        folder.write(1, 1)
        folder.write(2, 2)
        assert folder.latest().tree == 2
        assert sorted(path.name for path in tmp_path.iterdir()) == [
            "batch-000000000002.safetensors", "batch-9.safetensors", "notes.txt",
        ]  # fmt: skip

    def test_failed_write_drops_nothing(self, tmp_path, monkeypatch):
        folder = CheckpointFolder(tmp_path, keep=1)
        folder.write(1, 1)

        def fail(*args):
            raise OSError(errno.ENOSPC, "No space left")

        monkeypatch.setattr(checkpoint.os, "fsync", fail)
        with pytest.raises(CheckpointError, match="No space left"):
            folder.write(2, 2)
        assert folder.latest().tree == 1

    def test_arguments(self, tmp_path):
        with pytest.raises(ConfigError, match="keep must be at least 1"):
            CheckpointFolder(tmp_path, keep=0)
        with pytest.raises(ValueError, match="negative"):
            CheckpointFolder(tmp_path).write(1, -1)
        (tmp_path / "file").write_text("")
        with pytest.raises(CheckpointError, match="cannot be made"):
            CheckpointFolder(tmp_path / "file").write(1, 1)

    def test_of_another_kind(self, tmp_path):
        shutil.copy(CheckpointFolder(tmp_path / "a", kind="x").write(1, 1), tmp_path)
        with pytest.raises(CheckpointError, match="kind 'x' where 'run' is needed"):
            CheckpointFolder(tmp_path).latest()


@pytest.mark.parametrize(
    ("head", "dtype"),
    [(head, "float64") for head in ("auto", "reset", "drift", "forget", "static", "ridge", "adam")]
    + [(head, "float32") for head in ("reset", "drift", "forget", "static")],
)
@pytest.mark.parametrize("outputs", [1, 3])
@pytest.mark.parametrize("rows", [1, 16])
def test_a_learner_goes_on_bit_for_bit_from_a_file(tmp_path, head, outputs, rows, dtype):
    """A tensor that comes back in another layout is multiplied in another order."""
    generator = torch.Generator().manual_seed(0)

    def make():
        config = ModelConfig(head=head, width=12, skip=True, average=0.9, device="cpu", dtype=dtype)
        return build_learner(config, (5,), (outputs,))

    def batch():
        x = torch.randn(rows, 5, generator=generator) * 3 + 1
        return x, x[:, :outputs].sin() + torch.randn(rows, outputs, generator=generator)

    whole, resumed = make(), make()
    for _ in range(15):
        whole.learn(*batch())
    save(tmp_path / "learner", whole.state(), kind="run")
    resumed.load_state(load(tmp_path / "learner", kind="run"))
    for _ in range(5):
        x, y = batch()
        whole.learn(x, y)
        resumed.learn(x, y)
    command.assert_same(resumed.state(), whole.state())
    for key, value in command.leaves(whole.state()):
        if isinstance(value, torch.Tensor):
            assert value.stride() == torch.empty(value.shape).stride(), key
