"""The slack rule on mean slack instead of its low quantile, in a process of its own; prints gains as JSON.

The rule is compiled into the engine, so the other one is put in its place before the engine is imported, and its
machine code is kept apart.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile

import numpy as np
from numpy.typing import NDArray

from paceenv.core import timing

POLICY = "static:slack=0.02/0.3"


def mean_slack_s(rank: NDArray[np.float32], r: int) -> float:
    """Mean of recent waits plus the delay that this rule asked for last, seconds: what a rank could do on average."""
    return np.float64(rank[timing.WAIT_MEAN_S, r]) + np.float64(rank[timing.SLACK_DELAY_S, r])


def gains(names: list[str]) -> dict[str, tuple[float, float, float]]:
    """Throughput gain of :data:`POLICY` with its interval on each case of the suites, by name."""
    from paceenv.trainers.evaluation.evaluate import evaluate
    from paceenv.trainers.evaluation.suites import ALL, load_suite

    suite = load_suite(ALL).model_copy(update={"seeds": 16})
    suite = suite.model_copy(update={"cases": [case for case in suite.cases if case.name in names]})
    found = evaluate([POLICY], suite)
    scores = [found.score(POLICY, case) for case in suite.cases]
    return {score.cluster: (score.gain, *score.gain_ci95) for score in scores}


def main() -> None:
    rule, *names = sys.argv[1:]
    if rule == "mean":
        os.environ["PACEENV_CACHE_DIR"] = tempfile.mkdtemp()
        timing.slack_low_s = mean_slack_s
    print(json.dumps(gains(names)))


if __name__ == "__main__":
    main()
