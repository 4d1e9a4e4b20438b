"""The table of results that a person reads."""

from __future__ import annotations

from typing import Any

PARTS = ("prequential", "recent", "holdout")
# Only in JSON: with them the table of a field would not fit into a terminal.
UNLISTED = ("relative_l2_ratio",)


def results_table(result: dict[str, Any]) -> str:
    """Results of a run as aligned text: a row for each set of rows, a column for each metric."""
    parts = [part for part in PARTS if result.get(part)]
    names = [name for name in result[parts[0]] if name not in UNLISTED] if parts else []
    # A holdout from before a metric was measured has none.
    lines = [[part, *(number(result[part].get(name)) for name in names)] for part in parts]
    table = aligned([["", *names], *lines])
    return "\n".join([table, counts(result), *calibration(result), *leading(result)])


def aligned(lines: list[list[str]]) -> str:
    """Cells in columns, the first of them to the left."""
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )


def counts(result: dict[str, Any]) -> str:
    """How much was learnt, how fast, and what was left out."""
    speed = result["rows_per_second"]
    text = (
        f"{result['rows']} rows in {result['batches']} batches, {result['seconds']:.1f} s"
        f"{'' if speed is None else f', {speed:.0f} rows/s'}"
    )
    if result["bad_rows"]:
        text += f", {result['bad_rows']} bad rows left out"
    if result.get("missing_targets"):
        text += f", {result['missing_targets']} missing targets"
    return text


def calibration(result: dict[str, Any]) -> list[str]:
    """How often the model's own interval held what came, where that was measured."""
    measured = result.get("calibration")
    if not measured or measured["coverage"] is None:
        return []
    return [
        f"{measured['level']:.0%} interval: held {measured['coverage']:.1%} of the targets, "
        f"half width {number(measured['interval'])} (in {measured['batches']} batches)"
    ]


def leading(result: dict[str, Any]) -> list[str]:
    """Which heads of a bank lead, and the lambda and memory that they amount to."""
    if not result.get("heads"):
        return []
    names = ", ".join(f"{name} ({weight:.0%})" for name, weight in result["heads"])
    lines = [f"leading heads: {names}"]
    if "lambda" in result:
        lines.append(f"effective lambda {number(result['lambda'])}, memory {rows(result)}")
    return lines


def rows(result: dict[str, Any]) -> str:
    """What a bank remembers, in whole rows where there are many."""
    memory = result["memory"]
    return f"{number(memory)} rows" if memory < 1000 else f"{memory:.0f} rows"


def number(value: float | None) -> str:
    """Number with four digits; a dash where there is none."""
    return "-" if value is None else f"{value:.4g}"
