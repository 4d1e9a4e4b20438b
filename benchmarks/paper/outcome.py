"""What the paper's experiments share: their table in Markdown beside the JSON, and the claims."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# These scripts are run by path, so only their own folder is importable.
sys.path.insert(0, str(Path(__file__).parents[1]))
from common import RESULTS, bar, finish

__all__ = ["RESULTS", "bar", "finish", "markdown", "publish", "shown"]


def shown(value: Any) -> str:
    """A cell: three digits of a number, a dash for nothing."""
    if value is None:
        return "-"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def markdown(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A table in Markdown."""
    lines = [columns, ["---"] * len(columns), *[[shown(v) for v in row] for row in rows]]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def publish(
    name: str,
    protocol: str,
    results: dict[str, Any],
    bars: Sequence[dict[str, Any]],
    table: str,
    claims: Sequence[str],
    quick: bool,
) -> None:
    """Print the table with the claims under it, write both, and finish as every benchmark does."""
    text = table + "\n" + "\n\n".join(claims) + "\n"
    print(text)
    if not quick:
        (RESULTS / f"{name}.md").write_text(text)
    finish(name, protocol, {**results, "claims": list(claims)}, bars, quick)
