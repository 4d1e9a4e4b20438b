"""Wrong command lines end in one line that names what is wrong, with code 2 and no traceback."""

import os
import random
import re
import subprocess
import sys

import numpy as np
import pytest
from command import call, ok, parquet_of, refused, vector_zarr, zarr_of

from kalmanhead import config
from kalmanhead.cli import options as cli_options


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Sources and a run that nobody changes."""
    folder = tmp_path_factory.mktemp("refusals")
    x = np.random.default_rng(0).normal(size=(30, 16))
    vector_zarr(folder / "v.zarr", 60)
    zarr_of(folder / "f.zarr", x=x, y=x)
    zarr_of(folder / "odd.zarr", x=x, y=x[:29])
    parquet_of(folder / "p.parquet", 60)
    parquet_of(folder / "other.parquet", 60, d=np.zeros(60))
    (folder / "text.parquet").write_text("no parquet")
    (folder / "notes.txt").write_text("hello")
    (folder / "bad.toml").write_text("a = = 1")
    (folder / "empty").mkdir()
    (folder / "file").write_text("")
    ok("stream", "--source", folder / "v.zarr", "--run", folder / "run", "--width", 4)
    ok("stream", "--source", folder / "f.zarr", "--run", folder / "frun", "--width", 4,
       "--modes", 4)  # fmt: skip
    ok("stream", "--source", folder / "p.parquet", "--run", folder / "prun", "--width", 4)
    return folder


STREAM = "stream --source v.zarr --width 4 --run new"
WRONG = [
    ("strem", "No such command 'strem'"),
    ("--colour", "No such option"),
    ("stream", "Missing option '--source'"),
    ("stream --source absent.zarr", "no such file or directory: absent.zarr"),
    ("stream --source absent.parquet", "absent.parquet"),
    ("stream --source empty", "empty holds no Parquet files"),
    ("stream --source notes.txt", "notes.txt is neither Parquet nor Zarr"),
    ("stream --source text.parquet", "text.parquet cannot be read as Parquet"),
    ("stream --source kafka:topic", "no such file or directory: kafka:topic"),
    ("stream --source river:Trump", "Trump"),
    ("stream --source river.synth:Friedman --epochs 2", "no known end"),
    ("stream --source odd.zarr", "30.*29"),
    ("stream --source v.zarr --x inputs", "has no array inputs; it has x, y"),
    ("stream --source v.zarr --field u", "has no array u"),
    ("stream --source v.zarr --target y", "no option targets"),
    ("stream --source p.parquet --target z", "no column 'z'; there are a, b, c, y"),
    ("stream --source p.parquet --feature q", "no column 'q'"),
    ("stream --source p.parquet --weight q", "no column 'q'"),
    ("stream --source p.parquet --field a", "has no option field"),
    (f"{STREAM} --field x --lead 60", "lead"),
    (f"{STREAM} --batch-size 0", "--batch-size.*0 is not in the range"),
    (f"{STREAM} --batch-size many", "--batch-size.*'many' is not a whole number"),
    (f"{STREAM} --batch-size 2.5", "'2.5' is not a whole number"),
    (f"{STREAM} --lam 0", "--lam.*range x>0"),
    (f"{STREAM} --lam nan", "--lam.*'nan' is not a finite number"),
    (f"{STREAM} --lr inf", "--lr.*'inf' is not a finite number"),
    (f"{STREAM} --lr 1e300", r"lr is 1e\+300: give a learning rate from 0 to 1e\+30"),
    (f"{STREAM} --eta 2", "--eta.*range 0<=x<=1"),
    (f"{STREAM} --gamma -1", "--gamma"),
    (f"{STREAM} --head kalman", "--head.*'kalman' is not one of 'auto', 'reset'"),
    (f"{STREAM} --head drift --eta", "--eta.*requires an argument"),
    (f"{STREAM} --order both", "--order.*'head-first', 'backbone-first'"),
    (f"{STREAM} --device tpu", "--device.*'auto', 'cpu'"),
    (f"{STREAM} --device mps", "device 'mps' is not available: choose auto or one of cpu"),
    (f"{STREAM} --seed -1", "--seed"),
    (f"{STREAM} --seed 99999999999999999999", "--seed"),
    (f"{STREAM} --width 99999999", "--width"),
    (f"{STREAM} --holdout 60", "holdout of 60 rows leaves none of 60"),
    (f"{STREAM} --holdout 2.5", "holdout is 2.5; give a count of rows or a fraction"),
    (f"{STREAM} --holdout inf", "--holdout.*not a finite number"),
    (f"{STREAM} --dims 2", "v.zarr"),
    (f"{STREAM} --backbone transformer", "transformer"),
    (f"{STREAM} --backbone fno", "fno"),
    ("stream --source v.zarr --backbone module:absent.module:make", "module absent.module is not"),
    ("stream --source v.zarr --backbone module:os.path:join", "os.path:join"),
    ("stream --source v.zarr --width 4 --run run", "holds a run already; go on with `kalmanhead"),
    ("stream --source v.zarr --width 4 --run file", "file: cannot be made"),
    ("stream --source v.zarr --config absent.toml", "absent.toml"),
    ("stream --source v.zarr --config bad.toml", "bad.toml is not a TOML file"),
    ("resume", "Missing argument 'RUN'"),
    ("resume absent", "absent: no such folder"),
    ("resume empty", "holds no run"),
    ("resume run --lam 3", "No such option.*--lam"),
    ("resume run --epochs 0", "--epochs"),
    ("show absent", "absent: no such folder"),
    ("show file", "holds no run|no such folder"),
    ("plot absent", "absent: no such folder"),
    ("predict run --source v.zarr", "Missing option '--out'"),
    ("predict run --source v.zarr --out p.csv", "vectors to a .parquet or a .zarr"),
    ("predict run --source v.zarr --out p.parquet --level 1", "--level"),
    ("predict run --source f.zarr --out p.parquet", "f.zarr"),
    ("predict run --source v.zarr --out other.parquet", "other.parquet exists.*--overwrite"),
    ("predict frun --source f.zarr --out q.parquet", "fields are written to a .zarr"),
    ("predict frun --source v.zarr --out p.zarr", "v.zarr"),
    ("predict prun --source v.zarr --out q.parquet", "v.zarr"),
    ("predict prun --source text.parquet --out q.parquet", "text.parquet"),
    ("predict empty --source v.zarr --out q.parquet", "holds no run"),
    ("make burgers", "Missing option '--out'"),
    ("make heat", "No such command 'heat'"),
    ("make burgers --out b.zarr --nu -1", "nu"),
    ("make burgers --out b.zarr --nu nan", "--nu"),
    ("make burgers --out b.zarr --time -1", "time"),
    ("make burgers --out b.zarr --length 0", "length"),
    ("make burgers --out b.zarr --grid 1", "grid"),
    ("make burgers --out v.zarr --samples 2 --grid 16", "v.zarr exists"),
]


@pytest.mark.parametrize(("line", "message"), WRONG, ids=[line for line, _ in WRONG])
def test_one_line_names_what_is_wrong(folder, monkeypatch, line, message):
    monkeypatch.chdir(folder)
    before = sorted(path.name for path in folder.iterdir())
    error = refused(*line.split())
    assert re.search(message, error), error
    assert sorted(path.name for path in folder.iterdir()) == before


def test_without_a_command_there_is_help():
    for arguments in ([], ["--help"], ["-h"], ["make"], ["make", "--help"]):
        result = ok(*arguments)
        assert result.out.startswith("Usage: kalmanhead")
    assert "predict" in ok().out


@pytest.mark.parametrize("command", ["stream", "resume", "show", "predict", "plot", "make burgers"])
def test_every_command_has_help(command):
    result = ok(*command.split(), "--help")
    assert command in result.out
    assert command.split()[0] in ok("--help").out


def test_help_and_wrong_options_need_no_torch():
    code = (
        "import sys, kalmanhead.cli.main as m\n"
        "sys.argv = ['kalmanhead', 'stream', '--batch-size', 'x']\n"
        "try:\n    m.main()\nexcept SystemExit as end:\n    assert end.code == 2\n"
        "assert 'torch' not in sys.modules and 'river' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stderr=subprocess.DEVNULL)


def test_the_module_is_a_program(folder):
    done = subprocess.run(
        [sys.executable, "-m", "kalmanhead.cli.main", "show", folder / "run", "--json"],
        capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0
    assert done.stderr == ""
    assert '"prequential"' in done.stdout


def test_the_heads_are_those_of_the_engine():
    assert cli_options.HEADS == config.HEADS


def test_what_the_system_refuses_is_one_line(folder, monkeypatch):
    monkeypatch.chdir(folder)
    for error, message in (
        (PermissionError(13, "Permission denied", "some/file"), "some/file: Permission denied"),
        (MemoryError(), "out of memory"),
        (RuntimeError("DefaultCPUAllocator:\nnot enough memory"), "out of memory"),
        (KeyboardInterrupt(), "interrupted"),
    ):

        def fails(*_, error=error, **__):
            raise error

        monkeypatch.setattr("kalmanhead.cli.running.open_stream", fails)
        result = call("stream", "--source", "v.zarr")
        assert message in result.err
        assert len(result.err.strip().splitlines()) == 1
        assert result.code == (130 if message == "interrupted" else 2)


VALUES = ["0", "1", "2", "-1", "3", "0.5", "1e-3", "1e300", "nan", "inf", "", "x", "y", "u", "a",
          "auto", "v.zarr", "f.zarr", "p.parquet", "other.parquet", "notes.txt", "run", "frun",
          "river:TrumpApproval", "module:torch.nn:Identity", "ø\n", "--", "static", "adam",
          "backbone-first", "cpu", "fill", "skip", "99999999999999999999"]  # fmt: skip


def test_random_command_lines_never_end_in_a_traceback(folder, monkeypatch):
    from kalmanhead.cli.stream import stream

    monkeypatch.chdir(folder)
    draw = random.Random(7)
    flags = sorted({flag for p in stream.params for flag in (*p.opts, *p.secondary_opts)})
    codes = []
    for number in range(200):
        command = draw.choice([
            ["stream", "--source", draw.choice(["v.zarr", "f.zarr", "p.parquet"])],
            ["stream", "--source", draw.choice(VALUES)],
            ["predict", draw.choice(["run", "frun", "prun"]), "--source", draw.choice(VALUES),
             "--out", f"fuzz/{number}.zarr"],
        ])  # fmt: skip
        if command[0] == "stream":
            command += ["--run", f"fuzz/{number}", "--max-rows", "12", "--width", "4", "--quiet"]
        for flag in draw.sample(flags, draw.randint(0, 4)):
            if flag != "--run":
                command.append(flag)
                if draw.random() < 0.85:
                    command.append(draw.choice(VALUES))
        result = call(*command)
        assert result.code in (0, 2), (command, result)
        assert "Traceback" not in result.err, (command, result)
        if result.code == 2:
            assert result.err.splitlines()[-1].startswith("kalmanhead: "), (command, result)
        codes.append(result.code)
    assert {0, 2} <= set(codes)
