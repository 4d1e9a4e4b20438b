"""The paper's theory against measurements: rate, one-step gain, envelope identity, critical point.

Protocol, in float64, with the engine's own heads and learner, three seeds:

(a) Full-batch alternation of the proximal solve (lambda 0.3) with a gradient step of half 1 / L on
wide two-layer networks of 16 to 4,096 units, 24 points; the rate is the slope of log loss over the
later half of the steps down to 1e-26, beside that of the losses which the kernels at the start
foretell, those of infinite width, and what the smallest eigenvalues alone guarantee
(alternation.py derives it).
(b) One step on the last layer of condition numbers 2 to 1e8, from the worst and from random
errors: shares of the excess loss left by a gradient step of 1 / L, by the solve and by the
proximal solve, beside their bounds (one_step.py derives them).
(c) The engine's gradient at fixed W against autograd through the solve, 40 random cases for each
form and seed: of the objective with its penalty, and without (envelope.py).
(d) Training from phi = 0 and from beside it, 600 steps (critical.py).
"""

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import bar, finish

from paper import alternation, critical, envelope, one_step
from paper.report import markdown_table, write_markdown

WIDTHS, KAPPAS = (16, 64, 256, 1024, 4096), (2.0, 10.0, 1e2, 1e3, 1e4, 1e6, 1e8)
WIDE = 1024  # from this width on the rate is judged

Row = dict[str, Any]


def measure(quick: bool) -> dict[str, list[Row]]:
    seeds = range(1 if quick else 3)
    widths = (64, WIDE) if quick else WIDTHS
    cases, steps = (5, 150) if quick else (40, 600)
    return {
        "rate": [alternation.alternate(m, seed, 4000) for m in widths for seed in seeds],
        "one_step": [
            one_step.shares_left(kappa, start, seed)
            for kappa in KAPPAS
            for start in ("worst", "random")
            for seed in seeds
        ],
        "envelope": [
            envelope.differences(form, seed * cases + case)
            for form in envelope.FORMS
            for seed in seeds
            for case in range(cases)
        ],
        "critical": [
            critical.trained(start, seed, steps) for start in critical.STARTS for seed in seeds
        ],
    }


def grouped(rows: list[Row], *keys: str) -> Iterable[tuple[Any, list[Row]]]:
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        key = tuple(row[k] for k in keys)
        groups.setdefault(key[0] if len(key) == 1 else key, []).append(row)
    return groups.items()


def mean(rows: list[Row], key: str) -> float:
    return float(np.mean([row[key] for row in rows]))


def rate_table(rows: list[Row]) -> str:
    keys = ("rate", "foretold", "foretold_by_limit", "guaranteed", "gradient_descent")
    body = [
        [
            str(width),
            *(mean(group, key) for key in (*keys, "r_squared", "moved")),
            *np.mean([row["smallest_eigenvalues"] for row in group], axis=0).tolist(),
            mean(group, "loss_after_one_exact_solve"),
        ]
        for width, group in grouped(rows, "width")
    ]
    header = ["width", "fitted rate", "by its kernels", "by infinite width", "guaranteed"]
    header += ["gradient descent on both layers", "R^2", "A moved by"]
    header += ["least eigenvalue of K", "of Theta", "loss after one exact solve"]
    return markdown_table(header, body)


def one_step_table(rows: list[Row]) -> str:
    body = []
    for kappa, group in grouped(rows, "kappa"):
        worst, random = ([r for r in group if r["start"] == start] for start in ("worst", "random"))
        body.append(
            [
                f"{kappa:g}",
                *(mean(part, "gradient") for part in (worst, random)),
                mean(group, "gradient_bound"),
                max(row["solve"] for row in group),
                *(mean(part, "proximal") for part in (worst, random)),
                mean(group, "proximal_bound"),
                f"{group[0]['gradient_steps_to_a_hundredth']:,}",
            ]
        )
    header = ["kappa", "gradient, worst", "random", "bound", "solve", "proximal, worst", "random"]
    return markdown_table([*header, "bound", "gradient steps to 1 %, worst"], body)


def envelope_table(rows: list[Row]) -> str:
    body = [
        [
            {"reset": "proximal"}.get(form, form),
            max(row["whole_objective"] for row in group),
            float(np.median([row["squared_error_alone"] for row in group])),
        ]
        for form, group in grouped(rows, "form")
    ]
    header = ["relative difference of gradients", "penalty included, largest"]
    return markdown_table([*header, "squared error alone, median"], body)


def critical_table(rows: list[Row]) -> str:
    body = []
    for start, group in grouped(rows, "start"):
        steps = [row["steps_to_move"] for row in group]
        moved = "never" if None in steps else f"{np.mean(steps):.0f}"
        body.append([start, moved, mean(group, "loss_left"), mean(group, "largest_gradient")])
    return markdown_table(["start", "steps until 10 % off", "loss left", "largest gradient"], body)


def judge(found: dict[str, list[Row]]) -> list[dict[str, Any]]:
    wide = [row for row in found["rate"] if row["width"] >= WIDE]
    widest = [row for row in wide if row["width"] == max(r["width"] for r in wide)]
    stuck = [row for row in found["critical"] if row["start"] in critical.STUCK]
    free = [row for row in found["critical"] if row["start"] not in critical.STUCK]
    escapes = [steps_by_size(found["critical"])[size] for size in critical.PERTURBED]
    own = max(abs(row["rate"] / row["foretold"] - 1) for row in wide)
    limit = float(np.mean([abs(row["rate"] / row["foretold_by_limit"] - 1) for row in widest]))
    values: list[tuple[str, float, float, bool]] = [
        ("(a) loss left over that at the start, largest of all widths",
         max(row["loss_left"] for row in found["rate"]), 1e-20, False),
        ("(a) least R^2 of a straight line through log loss, from width 1,024",
         min(row["r_squared"] for row in wide), 0.999, True),
        ("(a) rate off that of its kernels, largest from width 1,024", own, 0.1, False),
        ("(a) rate off that of infinite width, mean of the widest", limit, 0.1, False),
        ("(a) least rate over what the eigenvalues guarantee, from width 1,024",
         min(row["rate"] / row["guaranteed"] for row in wide), 0.99, True),
        ("(b) bounds violated", sum(map(one_step.violated, found["one_step"])), 0, False),
        ("(b) excess left by the solve, largest", max(r["solve"] for r in found["one_step"]),
         1e-12, False),
        ("(c) difference with the penalty, largest",
         max(row["whole_objective"] for row in found["envelope"]), 1e-10, False),
        ("(d) largest gradient where it is said to stand still",
         max(row["largest_gradient"] for row in stuck), 0, False),
        ("(d) largest loss left by the others", max(row["loss_left"] for row in free), 0.3, False),
        ("(d) steps per decade of perturbation, first over second four decades",
         (escapes[0] - escapes[1]) / (escapes[1] - escapes[2]), 1.5, False),
    ]  # fmt: skip
    return [bar(*value) for value in values]


def steps_by_size(rows: list[Row]) -> dict[float, float]:
    return {
        size: float(np.mean([r["steps_to_move"] or np.inf for r in rows if r["start"] == name]))
        for size in critical.PERTURBED
        for name in [f"perturbed by {size:g}"]
    }


def claims(bars: list[dict[str, Any]]) -> list[str]:
    """The paper's claims, each with whether its bars hold."""
    said = {
        "(a)": "in the regime of the neural tangent kernel the alternation reaches zero loss at a "
        "linear rate, which the kernels at the start foretell (narrower networks are faster than "
        "foretold, since their features move; an exact solve alone reaches zero from the width at "
        "which K has full rank)",
        "(b)": "one closed-form step gains on a gradient step, and the more the worse the "
        "features' condition (by a bound of our own derivation, reached from the worst errors; "
        "from random ones, whose loss lies along the large eigenvalues, a gradient step still "
        "takes off two thirds)",
        "(c)": "by the envelope theorem nothing need be propagated back through the solve, in the "
        "ridge and in the proximal form, the penalty counted as part of the objective",
        "(d)": "phi = 0 is a spurious critical point, and only exactly there does training stand "
        "still",
    }
    lines = []
    for part, claim in said.items():
        holds = all(b["holds"] for b in bars if b["name"].startswith(part))
        lines.append(f"{part} {'borne out' if holds else 'NOT borne out'}: {claim}.")
    return ["Claims of the paper. " + " ".join(lines)]


def draw(found: dict[str, list[Row]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4), layout="constrained")
    losses, rates, steps = figure.subplots(1, 3)
    for width, group in grouped(found["rate"], "width"):
        kept = group[0]["losses"]
        places = alternation.THINNED * np.arange(len(kept))
        losses.semilogy(places, kept, label=f"width {width}")
    losses.set(xlabel="step", ylabel="loss", title="alternation, full batch")
    for key, style in (("rate", "o-"), ("foretold", "s--"), ("foretold_by_limit", ":"),
                       ("guaranteed", "-."), ("gradient_descent", "^-")):  # fmt: skip
        pairs = [(width, mean(group, key)) for width, group in grouped(found["rate"], "width")]
        rates.semilogx(*zip(*pairs, strict=True), style, label=key.replace("_", " "))
    rates.set(xlabel="width", ylabel="rate of the loss per step", title="fitted and foretold")
    for key, start, style in (("gradient", "worst", "o"), ("gradient", "random", "o:"),
                              ("gradient_bound", "worst", "k-"), ("proximal", "random", "s:"),
                              ("proximal_bound", "worst", "k--")):  # fmt: skip
        rows = [row for row in found["one_step"] if row["start"] == start]
        pairs = [(kappa, mean(group, key)) for kappa, group in grouped(rows, "kappa")]
        steps.semilogx(*zip(*pairs, strict=True), style, label=f"{key}, {start}".replace("_", " "))
    steps.set(xlabel="condition number", ylabel="share of the excess left", title="one step")
    for axes in (losses, rates, steps):
        axes.legend(fontsize=7)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one seed, two widths, few cases")
    quick = parser.parse_args().quick
    print(__doc__)
    torch.set_num_threads(1)
    found = measure(quick)
    tables = [rate_table(found["rate"]), one_step_table(found["one_step"]),
              envelope_table(found["envelope"]), critical_table(found["critical"])]  # fmt: skip
    bars = judge(found)
    print("\n\n".join([*tables, *claims(bars)]), flush=True)
    path = finish("paper_theory", str(__doc__), found, bars, quick)
    title = "Theory of closed-form last layers, measured"
    write_markdown(path, title, tables, claims(bars), bars)
    draw(found, path.with_suffix(".png"))


if __name__ == "__main__":
    main()
