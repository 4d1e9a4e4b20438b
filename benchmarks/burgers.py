"""Burgers' equation with a Fourier neural operator: closed-form head against Adam.

Protocol: nu = 0.01 on (0, 1), u(0) -> u(1), 1,000 training and 200 held-out samples at 64
points, batch 20, 8 shuffled passes, FNO backbone by Adam at 3e-3 in every row, three seeds (of
the weights and the order). `reset` is the proximal head with lambda 100, head-first; `adam` is
the same network with its last layer trained by Adam too. Held-out relative L2 after each pass;
the bar takes the mean over seeds after the last.
"""

import argparse
import time

import torch
from common import bar, finish

from kalmanhead.config import ModelConfig, build_learner
from kalmanhead.streams.pde import Burgers

BATCH, POINTS = 20, 64


def fields(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    u0, u1 = Burgers(nu=0.01, grid=POINTS).sample(range(samples))
    return u0[:, None].float(), u1[:, None].float()


def relative_l2(learner, x, y) -> float:
    error = learner.predict(x) - y
    return float((error.norm(dim=2) / y.norm(dim=2)).mean())


def run(head: str, seed: int, train, test, passes: int) -> dict:
    lam = 100.0 if head == "reset" else None
    config = ModelConfig(head=head, lam=lam, lr=3e-3, seed=seed)
    learner = build_learner(config, (1, POINTS), (1, POINTS), 1)
    (x, y), seconds, curve = train, 0.0, []
    for epoch in range(passes):
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(1000 * seed + epoch))
        start = time.perf_counter()
        for rows in order.split(BATCH):
            learner.learn(x[rows], y[rows])
        seconds += time.perf_counter() - start
        curve.append(relative_l2(learner, *test))
    return {"head": head, "seed": seed, "relative_l2": curve, "seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one seed, two passes")
    quick = parser.parse_args().quick
    print(__doc__)
    seeds, passes, training = (1, 1, 200) if quick else (3, 8, 1000)
    x, y = fields(training + 200)
    train, test = (x[:training], y[:training]), (x[training:], y[training:])
    rows = []
    for seed in range(seeds):
        for head in ("reset", "adam"):
            rows.append(run(head, seed, train, test, passes))
            print(head, seed, [round(v, 4) for v in rows[-1]["relative_l2"]], flush=True)
    last = {
        head: sum(r["relative_l2"][-1] for r in rows if r["head"] == head) / seeds
        for head in ("reset", "adam")
    }
    seconds = {h: sum(r["seconds"] for r in rows if r["head"] == h) for h in last}
    results = {
        "rows": rows,
        "mean_after_last_pass": last,
        "seconds_ratio": seconds["reset"] / seconds["adam"],
    }
    bars = [
        bar("held-out relative L2 of reset after 8 passes", last["reset"], 0.010, at_least=False),
        bar("reset over adam", last["reset"] / last["adam"], 1.0, at_least=False),
    ]
    finish("burgers", __doc__, results, bars, quick)


if __name__ == "__main__":
    main()
