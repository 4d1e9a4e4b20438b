"""The README does not go stale: its examples run, its commands parse, its figures are measured.

`python tests/test_readme.py` puts new figures into its tables, and prints those that it lacks.
"""

import json
import re
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from kalmanhead.cli.main import cli

ROOT = Path(__file__).parent.parent
README_FILE = ROOT / "README.md"
README = README_FILE.read_text(encoding="utf-8")
RESULTS = ROOT / "benchmarks" / "results"
BLOCK = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
HEADS = {"reset": "closed form (`reset`, lambda 100)", "adam": "Adam, last layer included"}


def blocks(language):
    """Blocks of a language as pairs of what stands behind it and the text."""
    return [
        (info.strip(), text) for found, info, text in BLOCK.findall(README) if found == language
    ]


def commands(program):
    lines = (line for _, text in blocks("sh") for line in text.splitlines())
    return [line for line in lines if line.split()[:1] == [program]]


def result(name):
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def burgers_table():
    results = result("burgers")["results"]
    lines = [
        "| Burgers' equation, FNO | held-out relative L2, mean | each seed | time, Adam = 1 |",
        "|---|---|---|---|",
    ]
    base = sum(row["seconds"] for row in results["rows"] if row["head"] == "adam")
    for head, label in HEADS.items():
        rows = [row for row in results["rows"] if row["head"] == head]
        seeds = ", ".join(f"{row['relative_l2'][-1]:.4f}" for row in rows)
        time = sum(row["seconds"] for row in rows) / base
        mean = results["mean_after_last_pass"][head]
        lines.append(f"| {label} | {mean:.4f} | {seeds} | {time:.2f} |")
    return lines


def zarr_table():
    lines = ["| Reading Zarr, rows/s | `open_source` | zarr alone | ratio |", "|---|---|---|---|"]
    for case, figures in result("zarr_reading")["results"].items():
        speed = figures["rows_per_second"]
        ratio = figures["ratio"]
        lines.append(f"| {case} | {speed['ours']:,} | {speed['direct']:,} | {ratio:.2f} |")
    return lines


def overhead_table():
    results = result("overhead")["results"]
    rows = [
        f"| `{head}` | {loop['bare_us_per_batch']:.0f} | {loop['stream_us_per_batch']:.0f} | "
        f"{loop['ratio']:.2f} |"
        for head, loop in results["loops"].items()
    ]
    memory = " and ".join(
        f"{mb:.0f} MB after {int(n):,} batches" for n, mb in results["peak_mb"].items()
    )
    return [
        "| µs a batch of 32, MLP | tensors in memory | whole stream | ratio |",
        "|---|---|---|---|",
        *rows,
        f"| peak memory of a process | | {memory} | |",
    ]


def bank_table():
    lines = [
        "| error | bank | Adam | Adam, averaged | SGD | best single head | plain baseline |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in result("bank")["results"]["table"]:
        best = {family: found["value"] for family, found in row["best"].items()}
        single = min(v for f, v in best.items() if f in ("ridge", "reset", "drift", "forget"))
        plain = min(row.get("baselines", {"": float("nan")}).values())
        figures = [best["auto"], best["adam"], best["adam, averaged"], best["sgd"], single, plain]
        cells = " | ".join("" if f != f else f"{f:.3g}" for f in figures)
        lines.append(f"| {row['stream']} | {cells} |")
    return lines


def honesty_table():
    results = result("honesty")["results"]
    rows = [f"| {row['stream']} | {row['coverage']:.1%} |" for row in results["intervals"]]
    return ["| share of targets in the 90 % interval | |", "|---|---|", *rows]


def bank_cost_table():
    table = result("bank_cost")["results"]["table"]
    rows = [
        f"| {name} | {row['early']:.1f} | {row['settled']:.1f} |"
        for name, row in table.items()
        if name != "ratios"
    ]
    header = "| ms a step, d = 128, batch 32 | early | settled |"
    return [header, "|---|---|---|", *rows]


def river_table():
    lines = [
        "| MAE, row by row | `KalmanHeadRegressor` | best peer | | persistence | running mean |",
        "|---|---|---|---|---|---|",
    ]
    for row in result("river_table")["results"]["table"]:
        if "ratio" not in row:
            continue
        peer = row["best_peer"]["mae"]
        names = ("kalmanhead", peer, "persistence", "running mean")
        own, best, *plain = (f"{row['models'][name]['mae']:.3g}" for name in names)
        lines.append(f"| {' | '.join([row['set'], own, best, peer, *plain])} |")
    return lines


def river_classes_table():
    lines = [
        "| accuracy, AUC, log-loss, calibration | `KalmanHeadClassifier` | best peer in each |",
        "|---|---|---|",
    ]
    for row in result("river_table")["results"]["table"]:
        if "ratio" in row:
            continue
        own = row["models"]["kalmanhead"]
        best = {k: row["models"][name][k] for k, name in row["best_peer"].items()}
        cells = [
            ", ".join(
                f"{part[k]:.3f}" if k in part else "-"
                for k in ("accuracy", "auc", "log_loss", "ece")
            )
            for part in (own, best)
        ]
        lines.append(f"| {row['set']} | {' | '.join(cells)} |")
    return lines


def latency_table():
    speeds = result("latency")["results"]["rows_per_second"]
    rows = [f"| {name} | {speed:,.0f} |" for name, speed in speeds.items()]
    return ["| rows a second, predict_one and learn_one, one thread | |", "|---|---|", *rows]


def live_table():
    lines = [
        "| solver, rows seen once | error, bank | Adam | plain | steps, bank | Adam |",
        "|---|---|---|---|---|---|",
    ]
    for row in result("live")["results"]["table"]:
        models = row["models"]
        rivals = [m for name, m in models.items() if name.startswith("Adam")]
        bank, adam = models["bank"], min(rivals, key=lambda m: m["last"])
        steps = ["", ""]
        if "steps" in bank:
            steps = [f"{bank['steps']:.0f}", f"{max(m['steps'] for m in rivals):.0f}"]
        errors = [f"{v:.3g}" for v in (bank["last"], adam["last"], min(row["plain"].values()))]
        lines.append(f"| {' | '.join([row['stream'], *errors, *steps])} |")
    return lines


def qm9_table():
    lines = [
        "| QM9, one pass, MAE of gap, alpha, dipole | bank | Adam | SGD | proximal | naive ridge |",
        "|---|---|---|---|---|---|",
    ]
    proximal = "Algorithm 1, Adam"
    for row in result("paper_qm9")["results"]["table"]:
        names = ("bank", "Adam", "SGD", proximal, "naive ridge")
        cells = [
            ", ".join(f"{value:.3f}" for value in row["mae"][name]) if name in row["mae"] else ""
            for name in names
        ]
        lines.append(f"| batch {row['batch']}, seeds {row['seeds']} | {' | '.join(cells)} |")
    return lines


def classification_table():
    """Best of each family: accuracy and log-loss."""
    names = ("closed-form cross-entropy", "one-hot, drift", "one-hot, proximal",
             "cross-entropy, Adam", "cross-entropy, SGD")  # fmt: skip
    lines = [
        f"| accuracy, log-loss, one pass | {' | '.join(names)} |",
        "|---|" + "---|" * len(names),
    ]
    for table in result("paper_classification")["results"]["tables"]:
        cells = []
        for name in names:
            own = [r["figures"] for r in table["runs"] if r["family"] == name and r["figures"]]
            if not own or "log_loss" not in own[0]:
                break
            accuracy = max(figures["accuracy"] for figures in own)
            cells.append(f"{accuracy:.3f}, {min(figures['log_loss'] for figures in own):.3f}")
        else:
            lines.append(f"| {table['stream']} | {' | '.join(cells)} |")
    return lines


TABLES = {
    "bank": bank_table,
    "honesty": honesty_table,
    "bank_cost": bank_cost_table,
    "burgers": burgers_table,
    "river_table": river_table,
    "river_classes": river_classes_table,
    "latency": latency_table,
    "zarr_reading": zarr_table,
    "overhead": overhead_table,
    "live": live_table,
    "paper_qm9": qm9_table,
    "paper_classification": classification_table,
}
FILES = {"river_classes": "river_table"}
MEASURED = {
    name: make
    for name, make in TABLES.items()
    if (RESULTS / f"{FILES.get(name, name)}.json").exists()
}


def test_the_python_examples_run_in_order(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "readme"}
    for info, text in blocks("python"):
        if info.startswith("needs=") and find_spec(info.removeprefix("needs=")) is None:
            continue
        if info.startswith("file="):
            Path(info.removeprefix("file=")).write_text(text, encoding="utf-8")
        exec(compile(text, f"README.md {info}", "exec"), namespace)


@pytest.mark.parametrize("line", commands("kalmanhead"))
def test_the_commands_parse(line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert '`source = "prices.parquet"`' in README
    Path("run.toml").write_text('source = "prices.parquet"\ntarget = ["close"]\n', encoding="utf-8")
    command, words = cli, shlex.split(line, comments=True)[1:]
    context = cli.make_context("kalmanhead", list(words), resilient_parsing=True)
    while hasattr(command, "resolve_command"):
        name, command, words = command.resolve_command(context, words)
        context = command.make_context(name, list(words), parent=context)
    assert not hasattr(command, "commands")


def test_the_worked_example_is_what_make_demo_runs():
    dry = subprocess.run(
        ["make", "-n", "demo"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.replace("\\\n", " ")
    done = [" ".join(line.partition(".venv/bin/")[2].split()) for line in dry.splitlines()]
    shown = [line for line in commands("kalmanhead") if "demo/" in line]
    assert shown
    assert set(shown) <= set(done)


def test_the_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = [line.split()[1] for line in commands("make")]
    assert {"demo", "test"} <= set(targets)
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_the_links_lead_somewhere():
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", README)
    assert links
    for link in links:
        assert (ROOT / link).is_file(), link


@pytest.mark.parametrize("name", MEASURED)
def test_the_figures_are_those_of_the_benchmarks(name):
    table = "\n".join(MEASURED[name]())
    header = table.splitlines()[0]
    assert header in README, "`python tests/test_readme.py` prints the table"
    assert shown_below(header) == table, "`python tests/test_readme.py` puts new figures in"


def shown_below(header):
    return README[README.index(header) :].split("\n\n")[0]


if __name__ == "__main__":
    written = README
    for make in MEASURED.values():
        made = make()
        if made[0] in README:
            written = written.replace(shown_below(made[0]), "\n".join(made))
        else:
            sys.stdout.write("no such table in the README yet:\n" + "\n".join(made) + "\n\n")
    README_FILE.write_text(written, encoding="utf-8")
