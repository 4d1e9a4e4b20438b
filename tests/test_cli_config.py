"""`--config`: a file stands behind the flags, and is checked as they are."""

import tomllib

import pytest
from command import newest, ok, parquet_of, refused, vector_zarr


@pytest.fixture
def source(tmp_path):
    return vector_zarr(tmp_path / "data.zarr", 60)


@pytest.fixture
def write(tmp_path):
    def write(text):
        path = tmp_path / "c.toml"
        path.write_text(text)
        return path

    return write


def test_flags_win_over_the_file_and_the_file_over_defaults(source, write, tmp_path):
    config = write(
        f'source = "{source}"\nbatch-size = 10\nhead = "static"\nlam = 2\nepochs = 2\n'
        f'shuffle = true\nquiet = true\njson = true\nrun = "{tmp_path / "named"}"\nwidth = 4\n'
    )
    result = ok("stream", "--config", config, "--epochs", 1, "--no-shuffle")
    assert result.out.count("\n") == 1
    assert result.json["batches"] == 6
    stored = tomllib.loads((tmp_path / "named" / "config.toml").read_text())
    assert (stored["batch_size"], stored["lam"], stored["shuffle"]) == (10, 2.0, False)
    assert (stored["head"], stored["order"]) == ("static", "head-first")
    assert not {"quiet", "json", "as_json", "run", "config"} & set(stored)


def test_the_configuration_of_a_run_makes_the_same_run_again(source, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    ok("stream", "--source", source, "--run", first, "--width", 4, "--epochs", 2,
       "--head", "reset", "--lam", 3, "--skip", "--holdout", 10)  # fmt: skip
    ok("stream", "--config", first / "config.toml", "--run", second)
    assert (first / "metrics.jsonl").read_bytes() == (second / "metrics.jsonl").read_bytes()
    assert (first / "config.toml").read_bytes() == (second / "config.toml").read_bytes()


@pytest.mark.parametrize("value", ['"y"', '["y"]'])
def test_a_name_or_a_list_of_names(write, tmp_path, value):
    source = parquet_of(tmp_path / "d.parquet", 60)
    config = write(f"target = {value}")
    ok("stream", "--config", config, "--source", source, "--run", tmp_path / "r", "--width", 4)
    assert list(newest(tmp_path / "r")["rows"]["y_names"]) == ["y"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lambda = 3", r"c\.toml: key 'lambda' is no option of `kalmanhead stream`; there .*lam"),
        ('config = "other.toml"', "key 'config' is no option"),
        ("batch-size = 0", r"c\.toml: .*--batch-size.*range"),
        ("batch-size = 2.5", r"c\.toml: .*'2.5' is not a whole number"),
        ('batch-size = "ten"', r"c\.toml: .*'ten' is not a whole number"),
        ("batch-size = true", r"c\.toml: batch-size is True: give one number or text"),
        ("batch-size = [1]", r"batch-size is \[1\]: give one number or text"),
        ("lam = {a = 1}", r"lam is \{'a': 1\}: give one number"),
        ("lam = nan", r"c\.toml: .*--lam.*not a finite number"),
        ("seed = 1979-05-27", "seed is datetime.date.*give one number"),
        ("quiet = 1", "quiet is 1: give true or false"),
        ('shuffle = "yes"', "shuffle is 'yes': give true or false"),
        ("target = [[1]]", "give a list of names"),
        ('head = "kalman"', r"c\.toml: .*--head"),
        ("[head]\nlam = 1", "head is .*give one number or text"),
        ("seed = 1\nseed = 2", "c.toml is not a TOML file"),
    ],
)  # fmt: skip
def test_wrong_values_are_refused_with_the_file_named(source, write, tmp_path, text, message):
    import re

    line = refused("stream", "--config", write(text), "--source", source, "--run", tmp_path / "r")
    assert re.search(message, line), line
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("colour = 3", "key 'colour' is no option"),
        ('run = "x"', "key 'run' is no option"),
        ("width = [3]", "width is"),
        ("eta = 3", "config.toml: .*--eta"),
        ("seed = = 3", "config.toml.*mend the file"),
    ],
)
def test_a_run_with_a_wrong_configuration_is_not_resumed(source, tmp_path, text, message):
    import re

    ok("stream", "--source", source, "--run", tmp_path / "r", "--skip")
    path = tmp_path / "r" / "config.toml"
    path.write_text(f"{path.read_text()}\n{text}\n")
    out = ["--source", source, "--out", tmp_path / "p.parquet"]
    for command in (["resume", tmp_path / "r"], ["predict", tmp_path / "r", *out]):
        line = refused(*command)
        assert re.search(message, line), line
