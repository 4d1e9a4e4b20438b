"""What a learning step costs with the bank, beside a step with one head.

Protocol: 20 inputs, one target (a smooth function with noise), MLP of width 107, so that the head
has d = 128 features with the constant and the inputs; batch 32, one thread. Learners take turns,
ten steps each, over the same rows. Early is the median over steps 50 to 200, when all blocks of
heads are awake; settled the median over steps 450 to 900, when those that do not matter sleep. The
bar compares like with like: the bank and a single remembering head, both without the averaged model
that is a default of the bank and an option of every head; what averaging adds is shown.
"""

import argparse
import statistics
import time

import torch
from common import bar, finish

from kalmanhead.bank import HeadBank
from kalmanhead.config import ModelConfig, build_learner
from kalmanhead.learner import OnlineLearner

INPUTS, WIDTH, BATCH, TURN = 20, 107, 32, 10
CONFIGS = {
    "bank": {"head": "auto", "average": 0.0},
    "bank, averaged (default)": {"head": "auto"},
    "drift": {"head": "drift", "eta": 0.001, "skip": True},
    "drift, averaged": {"head": "drift", "eta": 0.001, "skip": True, "average": 0.95},
    "reset": {"head": "reset", "skip": True},
    "adam": {"head": "adam"},
}


def rows(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, INPUTS, generator=generator)
    y = torch.sin(x[:, :1]) + x[:, 1:2] * x[:, 2:3]
    return x, y + 0.1 * torch.randn(count, 1, generator=generator)


def time_turns(learners: dict[str, OnlineLearner], turns: int) -> dict[str, list[float]]:
    """Milliseconds a step, one figure a turn."""
    x, y = rows(turns * TURN * BATCH)
    times: dict[str, list[float]] = {name: [] for name in learners}
    for turn in range(turns):
        part = slice(turn * TURN * BATCH, (turn + 1) * TURN * BATCH)
        batches = list(zip(x[part].split(BATCH), y[part].split(BATCH), strict=True))
        for name, learner in learners.items():
            start = time.perf_counter()
            for a, b in batches:
                learner.learn(a, b)
            times[name].append((time.perf_counter() - start) / TURN * 1e3)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few steps")
    quick = parser.parse_args().quick
    print(__doc__)
    torch.set_num_threads(1)
    learners = {
        name: build_learner(ModelConfig(width=WIDTH, **options), (INPUTS,), (1,))  # type: ignore[arg-type]
        for name, options in CONFIGS.items()
    }
    times = time_turns(learners, 24 if quick else 90)
    spans = {"early": slice(5, 20), "settled": slice(20 if quick else 45, None)}
    table = {
        name: {span: statistics.median(values[part]) for span, part in spans.items()}
        for name, values in times.items()
    }
    for name, row in table.items():
        print(name, {span: f"{value:.2f} ms" for span, value in row.items()})
    head = learners["bank"].head
    assert isinstance(head, HeadBank)
    bars = []
    for span in spans:
        for one, other in (
            ("bank", "drift"),
            ("bank, averaged (default)", "drift, averaged"),
            ("bank, averaged (default)", "drift"),
            ("bank, averaged (default)", "reset"),
        ):
            ratio = statistics.median(
                a / b
                for a, b in zip(times[one][spans[span]], times[other][spans[span]], strict=True)
            )
            table.setdefault("ratios", {})[f"{one} over {other}, {span}"] = ratio
            print(f"{one} over {other}, {span}: {ratio:.2f}")
    settled = table["ratios"]["bank over drift, settled"]
    bars.append(bar("step of the bank over one of a single head", settled, 1.5, at_least=False))
    results = {"table": table, "heads": head.names, "leaders": head.leaders(), "times": times}
    finish("bank_cost", __doc__, results, bars, quick)


if __name__ == "__main__":
    main()
