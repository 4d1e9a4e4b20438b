"""The table of results that a person reads."""

from __future__ import annotations

from typing import Any

PARTS = ("prequential", "recent", "holdout")


def results_table(result: dict[str, Any]) -> str:
    """Results of a run as aligned text: a row for each set of rows, a column for each metric."""
    parts = [part for part in PARTS if result.get(part)]
    names = list(result[parts[0]]) if parts else []
    header = ["", *names]
    lines = [header] + [[part, *(number(result[part][name]) for name in names)] for part in parts]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    table = "\n".join(
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )
    speed = result["rows_per_second"]
    counts = (
        f"{result['rows']} rows in {result['batches']} batches, {result['seconds']:.1f} s"
        f"{'' if speed is None else f', {speed:.0f} rows/s'}"
    )
    if result["bad_rows"]:
        counts += f", {result['bad_rows']} bad rows left out"
    if result.get("missing_targets"):
        counts += f", {result['missing_targets']} missing targets"
    if result.get("heads"):
        leading = ", ".join(f"{name} ({weight:.0%})" for name, weight in result["heads"])
        counts += f"\nleading heads: {leading}"
    return f"{table}\n{counts}"


def number(value: float | None) -> str:
    """Number with four digits; a dash where there is none."""
    return "-" if value is None else f"{value:.4g}"
