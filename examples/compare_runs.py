"""Compares two runs of train_lm.py that must have ended alike, such as a run and one resumed from its middle.

    python examples/compare_runs.py outputs/run outputs/resumed

Exits with 1 if the held-out losses differ, or if the model did not learn from context.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

MIN_GAIN_NAT = 0.3
TOLERANCE_NAT = 1e-6


def main(first: str, second: str) -> int:
    results = [json.loads(Path(run, "eval_results.json").read_text()) for run in (first, second)]
    losses = [result["eval_loss"] for result in results]
    gain = results[0]["eval_unigram_entropy"] - losses[0]
    for run, loss in zip((first, second), losses, strict=True):
        print(f"{run}: held-out loss {loss:.6f} nat per byte")
    print(f"gain over the unigram entropy: {gain:.3f} nat per byte (at least {MIN_GAIN_NAT} wanted)")
    problems = []
    if abs(losses[0] - losses[1]) > TOLERANCE_NAT:
        problems.append(f"the two runs ended {abs(losses[0] - losses[1]):.2e} apart")
    if gain < MIN_GAIN_NAT:
        problems.append("the model did not learn from context")
    print("\n".join(problems) or "both runs ended alike")
    return bool(problems)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    sys.exit(main(*sys.argv[1:]))
