"""The walls of the house, read off the syntax trees: who imports whom, and what nobody does."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("kalmanhead", "streams", "cli")
FILES = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in FILES}
LONGEST = 450

UNSAFE_MODULES = {"pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
UNSAFE_CALLS = {"eval", "exec", "compile", "__import__"}
UNSAFE_ENDINGS = {"yaml.load", "yaml.unsafe_load", "torch.load", "builtins.eval", "builtins.exec"}
GLOBAL_SETTINGS = (
    "manual_seed", "manual_seed_all", "set_rng_state", "set_default_dtype",
    "set_default_tensor_type", "set_default_device", "set_num_threads", "set_num_interop_threads",
    "set_grad_enabled", "use_deterministic_algorithms", "set_float32_matmul_precision",
)  # fmt: skip


def of(*folders):
    return [path for path in FILES if path.relative_to(ROOT).parts[0] in folders]


def name_of(path):
    return path.relative_to(ROOT).as_posix()


def imports(tree):
    """Absolute names of all that is imported, at the top or inside functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            # `from kalmanhead import streams` imports kalmanhead.streams.
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def calls(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


def within(name, *modules):
    return any(name == module or name.startswith(module + ".") for module in modules)


def test_the_three_folders_are_found():
    assert {path.relative_to(ROOT).parts[0] for path in FILES} == set(FOLDERS)


@pytest.mark.parametrize("path", of("kalmanhead"), ids=name_of)
def test_the_engine_knows_no_sources_and_no_terminal(path):
    outer = ("kalmanhead.streams", "kalmanhead.cli", "streams", "cli", "click")
    assert [name for name in imports(TREES[path]) if within(name, *outer)] == []


@pytest.mark.parametrize("path", of("streams"), ids=name_of)
def test_sources_know_batches_and_errors_only(path):
    allowed = ("kalmanhead.batch", "kalmanhead.errors", "kalmanhead.streams")
    ours = [name for name in imports(TREES[path]) if within(name, "kalmanhead", "streams", "cli")]
    assert [name for name in ours if not within(name, *allowed)] == []


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_nothing_is_executed_that_was_read(path):
    tree = TREES[path]
    assert [name for name in imports(tree) if name.split(".")[0] in UNSAFE_MODULES] == []
    for name, call in calls(tree):
        assert name not in UNSAFE_CALLS
        assert not name.endswith(tuple(UNSAFE_ENDINGS))
        for keyword in call.keywords:
            if keyword.arg == "allow_pickle":
                assert ast.unparse(keyword.value) == "False", name
            assert keyword.arg != "shell" or ast.unparse(keyword.value) == "False", name


@pytest.mark.parametrize("path", of("kalmanhead", "streams"), ids=name_of)
def test_the_process_of_the_user_is_left_as_it_is(path):
    for name, _ in calls(TREES[path]):
        last = name.split(".")[-1]
        # generator.manual_seed(...) is local; torch.manual_seed(...) is everyone's.
        if last == "manual_seed":
            assert not name.startswith(("torch.manual_seed", "torch.random.", "torch.cuda.")), name
        else:
            assert last not in GLOBAL_SETTINGS, name
        assert name not in {"np.random.seed", "numpy.random.seed", "random.seed"}
        assert not name.startswith(("np.random.set_state", "numpy.random.set_state"))


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_files_stay_readable(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= LONGEST
