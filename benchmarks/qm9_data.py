"""QM9 from the package qm9pack: eigenvalues of Coulomb matrices, and three properties.

The package's CSVs are read directly, since its own loader imports what newer setuptools lack.
"""

import ast
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv as csv

CHARGES = {"H": 1.0, "C": 6.0, "N": 7.0, "O": 8.0, "F": 9.0}
ELEMENTS = tuple(CHARGES)
MOST_ATOMS = 29
HARTREE_IN_EV = 27.211386245988
TARGETS = {  # name: (column, factor to the unit, unit)
    "gap": ("HOMO_LUMO_gap_au", HARTREE_IN_EV, "eV"),
    "alpha": ("Polarizability_bohr3", 1.0, "bohr^3"),
    "dipole": ("Dipole_debye", 1.0, "D"),
}


def load(rows: int | None = None, seed: int = 0) -> dict[str, np.ndarray]:
    """Molecules in a random order.

    Returns
    -------
    dict
        `eigenvalues` (n, 29) of the Coulomb matrices by falling magnitude, zeros behind them;
        `counts` (n, 5) of the elements H, C, N, O, F; `targets` (n, 3): gap in eV, alpha in
        bohr^3, dipole in debye.
    """
    spec = find_spec("qm9pack")
    if spec is None or spec.origin is None:
        raise SystemExit("qm9pack is not installed: pip install --no-deps qm9pack==1.0.3")
    folder = Path(spec.origin).parent / "data"
    columns = ["Elements", "XYZ_Ang", *(column for column, _, _ in TARGETS.values())]
    options = csv.ConvertOptions(include_columns=columns)
    tables = [
        csv.read_csv(path, convert_options=options) for path in sorted(folder.glob("qm9_part*.csv"))
    ]
    table = pa.concat_tables(tables)
    order = np.random.default_rng(seed).permutation(len(table))[:rows]
    table = table.take(order)
    elements = [ast.literal_eval(text) for text in table["Elements"].to_pylist()]
    places = [np.array(ast.literal_eval(text)) for text in table["XYZ_Ang"].to_pylist()]
    counts = np.array([[atoms.count(e) for e in ELEMENTS] for atoms in elements], float)
    targets = [table[column].to_numpy() * factor for column, factor, _ in TARGETS.values()]
    return {
        "eigenvalues": coulomb_eigenvalues(elements, places),
        "counts": counts,
        "targets": np.stack(targets, 1),
    }


def coulomb_eigenvalues(elements: list[list[str]], places: list[np.ndarray]) -> np.ndarray:
    """Spectra of the matrices 0.5 Z_i^2.4 (diagonal) and Z_i Z_j / |r_i - r_j|, (n, 29)."""
    spectra = np.zeros((len(elements), MOST_ATOMS))
    sizes = np.array([len(atoms) for atoms in elements])
    for size in np.unique(sizes):
        which = np.flatnonzero(sizes == size)
        z = np.array([[CHARGES[e] for e in elements[i]] for i in which])
        r = np.stack([places[i] for i in which])
        distance = np.linalg.norm(r[:, :, None] - r[:, None], axis=-1)
        diagonal = np.arange(size)
        distance[:, diagonal, diagonal] = 1.0
        matrix = z[:, :, None] * z[:, None] / distance
        matrix[:, diagonal, diagonal] = 0.5 * z**2.4
        values = np.linalg.eigvalsh(matrix)
        ranks = np.argsort(-np.abs(values), axis=1)
        spectra[which, :size] = np.take_along_axis(values, ranks, 1)
    return spectra
