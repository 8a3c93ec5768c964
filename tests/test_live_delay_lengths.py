"""Lengths of delays in constant memory."""

from __future__ import annotations

import numpy as np
import pytest

from paceenv.live.decide.delay_lengths import LONGEST_S, RATIO, SHORTEST_S, DelayLengths


@pytest.mark.parametrize("seed", range(5))
def test_quantiles_are_right_within_a_bin(seed: int) -> None:
    lengths_s = np.exp(np.random.default_rng(seed).uniform(np.log(SHORTEST_S), np.log(LONGEST_S), 999))
    found = DelayLengths()
    for length_s in lengths_s:
        found.add(float(length_s))
    for share in (0.05, 0.5, 0.95):
        right_s = float(np.quantile(lengths_s, share, method="inverted_cdf"))
        assert found.quantile_s(share) == pytest.approx(right_s, rel=RATIO - 1.0)
    numbers = found.as_dict()
    assert numbers["max_s"] == lengths_s.max()
    assert numbers["mean_s"] == pytest.approx(lengths_s.mean())
    assert numbers["total_s"] == pytest.approx(lengths_s.sum())


def test_what_lies_outside_the_bins_counts() -> None:
    found = DelayLengths()
    assert found.as_dict() == {"mean_s": None, "p50_s": None, "p95_s": None, "max_s": 0.0, "total_s": 0.0}
    for length_s in (1e-9, 1e-9, 1e3):
        found.add(length_s)
    assert found.quantile_s(0.5) == pytest.approx(SHORTEST_S, rel=RATIO - 1.0)
    assert found.quantile_s(1.0) == pytest.approx(LONGEST_S * RATIO, rel=RATIO - 1.0)
