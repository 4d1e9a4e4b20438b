"""Real processes that are killed, interrupted and resumed end as undisturbed ones do."""

import random
import signal

import pytest
from command import Forker, assert_same_end, lines, parquet_of, vector_zarr

KILLS = 20
ROWS = 600
IN_ORDER = ["--epochs", "2", "--no-shuffle"]
CASES = {
    "reset, buffer, shuffled": (
        vector_zarr,
        ["--head", "reset", "--epochs", "2", "--buffer", "64", "--loss", "relative"],
    ),
    "static, in order": (parquet_of, ["--head", "static", "--skip", *IN_ORDER]),
}  # fmt: skip


@pytest.fixture(scope="module")
def forker():
    with Forker() as forker:
        yield forker


@pytest.fixture(scope="module", params=CASES)
def case(request, tmp_path_factory, forker):
    """The folder of an undisturbed run, and its command without --run."""
    folder = tmp_path_factory.mktemp("kill")
    make, options = CASES[request.param]
    source = make(folder / "data.zarr" if make is vector_zarr else folder / "data.parquet", ROWS)
    command = ["stream", "--source", source, "--batch-size", 10, "--width", 24,
               "--checkpoint-every", 3, "--quiet", *options]  # fmt: skip
    result = forker.run(*command, "--run", folder / "whole")
    assert result.code == 0, result
    return folder, command


def test_twenty_kills_change_no_bit(case, forker):
    folder, command = case
    run = folder / "killed"
    moments = random.Random(5)
    killed, reached = 0, []
    while killed < KILLS:
        begun = (run / "config.toml").exists()
        next_command = ["resume", run, "--quiet"] if begun else [*command, "--run", run]
        once, after = None, moments.uniform(0, 0.4)
        if moments.random() < 0.8:  # while learning or writing; the others, while starting
            batch = (reached[-1] if reached else 0) + 3 * moments.randint(1, 3)
            once = run / "checkpoints" / f"batch-{batch:012d}.safetensors"
            after = moments.uniform(0, 0.03)
        result = forker.run(*next_command, send=signal.SIGKILL, once=once, after=after)
        assert result.code in (0, -signal.SIGKILL), result
        killed += result.code != 0
        names = [path.stem for path in (run / "checkpoints").glob("batch-*.safetensors")]
        reached.append(max((int(name.removeprefix("batch-")) for name in names), default=0))
    result = forker.run("resume", run, "--quiet")
    assert result.code == 0, result
    assert_same_end(run, folder / "whole")
    assert lines(run)[-1]["rows"] == 2 * ROWS
    assert len(set(reached)) > 5  # it was killed all along, not only at its start
    left_over = [path.name for path in (run / "checkpoints").iterdir() if path.name[0] == "."]
    assert left_over == []


def test_a_signal_saves_and_says_how_to_go_on(case, forker):
    folder, command = case
    run = folder / "stopped"
    next_command = [part for part in [*command, "--run", run] if part != "--quiet"]
    for number, batch in ((signal.SIGTERM, 30), (signal.SIGINT, 60)):
        once = run / "checkpoints" / f"batch-{batch:012d}.safetensors"
        result = forker.run(*next_command, "--json", send=number, once=once)
        assert result.code == 128 + number, result
        assert f"go on: kalmanhead resume {run}" in result.out
        stopped = result.json["batches"]
        assert batch <= stopped < 2 * ROWS // 10
        assert result.json["checkpoint"].endswith(f"batch-{stopped:012d}.safetensors")
        assert len(lines(run)) == stopped
        assert result.err == ""
        next_command = ["resume", run]
    resumed = forker.run("resume", run, "--json")
    assert resumed.code == 0, resumed
    assert resumed.json["batches"] == 2 * ROWS // 10
    assert_same_end(run, folder / "whole")


def test_two_processes_on_one_run(case, forker):
    from kalmanhead.rundir import RunDirectory

    folder, _ = case
    with RunDirectory.open(folder / "whole", write=True):
        result = forker.run("resume", folder / "whole")
    assert result.code == 2
    assert "in use by another process" in result.err
    assert result.err.count("\n") == 1
