"""What every benchmark shares: the environment, the result file, the bars."""

from __future__ import annotations

import json
import os
import platform
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("kalmanhead", "torch", "numpy", "zarr", "pyarrow", "river")


def environment() -> dict[str, Any]:
    """Versions and machine, as plain JSON."""
    import torch

    packages = {}
    for name in PACKAGES:
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            packages[name] = "not installed"
    return {
        "python": platform.python_version(),
        "system": platform.system(),
        "machine": platform.machine(),
        "cpu_count": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        **packages,
    }


def bar(name: str, value: float, limit: float, at_least: bool = True) -> dict[str, Any]:
    """One bar: a figure, its limit, and whether it holds."""
    holds = value >= limit if at_least else value <= limit
    return {"name": name, "value": value, "limit": limit, "holds": bool(holds)}


def finish(
    name: str,
    protocol: str,
    results: dict[str, Any],
    bars: Sequence[dict[str, Any]],
    quick: bool,
) -> Path:
    """Write results/NAME.json and print where, then the bars as the last line.

    A quick run goes to NAME_quick.json in a temporary folder: it never replaces results.
    """
    folder = Path(tempfile.mkdtemp(prefix="kalmanhead-")) if quick else RESULTS
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / (f"{name}_quick.json" if quick else f"{name}.json")
    record = {
        "name": name,
        "protocol": " ".join(protocol.split()),
        "quick": quick,
        "environment": environment(),
        "results": results,
        "bars": list(bars),
    }
    path.write_text(json.dumps(record, indent=2) + "\n")
    print(f"written to {path}", file=sys.stderr)
    print(json.dumps({"bars": list(bars)}), flush=True)
    return path
