"""The lengths of a rank's delays over a whole job: count, sum, longest and quantiles, in constant memory."""

from __future__ import annotations

import math

SHORTEST_S, LONGEST_S = 1e-4, 10.0
"""Where the bins begin and end, seconds; what lies outside counts in the first or the last."""
RATIO = 1.02
"""Of a bin's two ends: a quantile is right within 1 %."""
_BINS = math.ceil(math.log(LONGEST_S / SHORTEST_S) / math.log(RATIO)) + 1


class DelayLengths:
    """Takes in one delay after the other."""

    def __init__(self) -> None:
        self.count = 0
        self.total_s = self.longest_s = 0.0
        self._bins = [0] * _BINS

    def add(self, seconds: float) -> None:
        """Take in a delay of a positive number of seconds."""
        self.count += 1
        self.total_s += seconds
        self.longest_s = max(self.longest_s, seconds)
        place = int(math.log(max(seconds, SHORTEST_S) / SHORTEST_S) / math.log(RATIO))
        self._bins[min(place, _BINS - 1)] += 1

    def quantile_s(self, share: float) -> float | None:
        """The length that ``share`` of the delays do not exceed, seconds; None without any."""
        left = math.ceil(share * self.count)
        for place, number in enumerate(self._bins):
            left -= number
            if number and left <= 0:
                return min(SHORTEST_S * math.pow(RATIO, place + 0.5), self.longest_s)
        return None

    def as_dict(self) -> dict[str, float | None]:
        """Mean, median, 95 % quantile, longest and sum, seconds; None for what no delay tells."""
        return {
            "mean_s": self.total_s / self.count if self.count else None,
            "p50_s": self.quantile_s(0.5),
            "p95_s": self.quantile_s(0.95),
            "max_s": self.longest_s,
            "total_s": self.total_s,
        }
