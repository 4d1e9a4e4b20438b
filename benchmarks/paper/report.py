"""A result's table in markdown, with the claims that it bears out below it."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

Cell = str | float | None


def shown(cell: Cell) -> str:
    if cell is None:
        return "diverged"
    return cell if isinstance(cell, str) else f"{cell:.4g}"


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[Cell]]) -> str:
    lines = [header, ["---"] * len(header), *([shown(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def write_markdown(
    path: Path,  # of the JSON; the table goes beside it
    title: str,
    tables: Sequence[str],
    claims: Sequence[str],
    bars: Sequence[dict[str, Any]],
) -> None:
    verdicts = [f"- {'holds' if b['holds'] else 'FAILS'}: {b['name']}: {b['value']:.4g} "
                f"(limit {b['limit']:g})" for b in bars]  # fmt: skip
    parts = [f"# {title}", *tables, *claims, "\n".join(verdicts)]
    path.with_suffix(".md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")
