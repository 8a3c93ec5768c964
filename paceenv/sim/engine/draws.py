"""Counter-based randomness: every draw is a hash of (episode key, stream, iteration, rank), never a stored state.

Results depend neither on batch size nor on threads nor on the order of evaluation. Two policies can be compared on the
same noise, and a simulation can be forked by copying arrays. Scalar functions here are plain Python that the kernel
compiles.

A per-rank draw costs two keyed rounds of a 32-bit integer hash (Wellons' ``lowbias32`` constants). 32 bits are enough
for one rank, and 32-bit multiplications fill a vector register. Per-job draws use the splitmix64 finaliser.
Distributions come from quantile tables that are linear on octaves of the tail probability. One sampler serves the
normal, the shifted gamma or any other marginal, out to probabilities of 2**-32.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import special

# Streams: what a draw is for. Numbers are part of the model's identity; append, never renumber.
JITTER, IMBALANCE, DRIFT, COMMON, PERSISTENT, SLOW_RANK = 1, 2, 3, 4, 5, 6
FAIL_SLOW, STALL, POST_WORK, TENANT, OBSERVER, CLUSTER = 7, 8, 9, 10, 11, 12
RECOVERY, INCAST, FAILURE, TRANSFER = 13, 14, 15, 16
LATE_WAKE, STAMPS, MISSING, LENGTH = 17, 18, 19, 20
PER_TENANT = 3
"""Counters of one tenant's draws at one time: its noise does not depend on how many tenants there are."""

_SUB_BITS = 5
_OCTAVES = 32
_SIDE = _OCTAVES << _SUB_BITS
TABLE_SIZE = 2 * _SIDE + 2
"""Entries of a quantile table: lower side from tail probability 2**-32 up to one half, then the upper side."""


def mix64(x: Any) -> Any:
    """The splitmix64 finaliser: a bijection of 64 bits that passes for random (Steele, Lea and Flood 2014).

    Of one ``np.uint64`` or of an array of them.
    """
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def key_of(key: np.uint64, stream: int, counter: int) -> np.uint64:
    """64 random bits for (key, stream, counter)."""
    x = mix64(key ^ (np.uint64(stream) * np.uint64(0x9E3779B97F4A7C15)))
    return np.uint64(mix64(x ^ (np.uint64(counter) * np.uint64(0xD1342543DE82EF95))))


def bits32(key: np.uint64, rank: int) -> np.uint32:
    """32 random bits for one rank under a 64-bit ``key``: for one key a bijection of the ranks.

    Every operation is cut back to 32 bits, because compiled arithmetic on two of them yields 64.
    """
    x = np.uint32(np.uint32(rank) ^ np.uint32(key & np.uint64(0xFFFFFFFF)))
    x = np.uint32((x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D))
    x = np.uint32((x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B))
    x = np.uint32((x ^ (x >> np.uint32(16))) + np.uint32(key >> np.uint64(32)))
    x = np.uint32((x ^ (x >> np.uint32(16))) * np.uint32(0x21F0AAAD))
    x = np.uint32((x ^ (x >> np.uint32(15))) * np.uint32(0x735A2D97))
    return np.uint32(x ^ (x >> np.uint32(15)))


def uniform(key: np.uint64, stream: int, counter: int) -> float:
    """A uniform on (0, 1) for (key, stream, counter); never 0 or 1."""
    return (float(key_of(key, stream, counter) >> np.uint64(12)) + 0.5) * 2.0**-52


def geometric(u: float, probability: float) -> int:
    """Trials up to and including the first success, from a uniform ``u``; at least 1, at most 2**62."""
    if probability >= 1.0:
        return 1
    if probability <= 0.0:
        return 1 << 62
    return 1 + int(min(math.log(u) / math.log1p(-probability), 4.0e18))


def position(bits: np.uint32) -> float:
    """Where 32 random bits fall in a quantile table: the node below as integer part, the way to the next as fraction.

    Read off the bit pattern of a float, which is linear in the logarithm octave by octave. Kept apart from the look-up
    because a loop over ranks with only this arithmetic runs in vector registers, and one with table loads does not.
    """
    tail = np.float64(2.0 * float(bits & np.uint32(0x7FFFFFFF)) + 1.0)  # 2**33 times the tail probability
    octaves = float(tail.view(np.int64)) * 2.0 ** -(52 - _SUB_BITS) - float(1023 << _SUB_BITS)
    return octaves + float(bits >> np.uint32(31)) * (_SIDE + 1)


def quantile(table: NDArray[np.float64], bits: np.uint32) -> float:
    """Value of the tabulated distribution at 32 random bits."""
    at = position(bits)
    node = np.uint64(at)
    value = table[node]
    return value + (at - float(node)) * (table[node + np.uint64(1)] - value)


def uniform_bits(u: float) -> np.uint32:
    """The 32 bits whose :func:`quantile` is the value at probability ``u``: tail bits below one half, then mirrored."""
    if u < 0.5:
        return np.uint32(min(u * 4294967296.0, 2147483647.0))
    return np.uint32(2147483648.0 + min((1.0 - u) * 4294967296.0, 2147483647.0))


def bits_of_ranks(key: np.uint64, bits_R: NDArray[np.uint32]) -> None:
    """The :func:`bits32` of every rank under ``key``; a loop of its own, so that it runs on 32-bit lanes."""
    for r in range(bits_R.shape[0]):
        bits_R[r] = bits32(key, r)


def quantiles(
    key: np.uint64, table: NDArray[np.float64], bits_R: NDArray[np.uint32], out_R: NDArray[np.float64]
) -> None:
    """The :func:`quantile` of every rank's draw under ``key``.

    Three loops: the hash on 32-bit lanes, positions in vector registers, and only table loads one by one.
    """
    bits_of_ranks(key, bits_R)
    for r in range(bits_R.shape[0]):
        at = position(bits_R[r])
        node = np.uint32(at)
        bits_R[r] = node
        out_R[r] = at - float(node)
    for r in range(bits_R.shape[0]):
        node = bits_R[r]
        value = table[node]
        out_R[r] = value + out_R[r] * (table[node + np.uint32(1)] - value)


def _tail_nodes() -> NDArray[np.float64]:
    """Tail probabilities at the table's nodes, ``(_SIDE + 1,)``, increasing to one half."""
    octave, step = np.divmod(np.arange(_SIDE + 1), 1 << _SUB_BITS)
    return np.ldexp(1.0 + step / (1 << _SUB_BITS), octave - 33)


@lru_cache(maxsize=256)
def normal_table() -> NDArray[np.float64]:
    """Quantile table ``(TABLE_SIZE,)`` of the standard normal."""
    lower = special.ndtri(_tail_nodes())
    return _frozen(np.concatenate([lower, -lower]))


@lru_cache(maxsize=256)
def gamma_table(skewness: float) -> NDArray[np.float64]:
    """Quantile table of a shifted gamma with mean 0, standard deviation 1 and the given skewness (0 is normal).

    Shape ``4 / skewness**2``; below a skewness of 0.02 the normal is closer than the gamma's own numerics.
    """
    if skewness < 0.02:
        return normal_table()
    shape, tail = 4.0 / skewness**2, _tail_nodes()
    lower = (special.gammaincinv(shape, tail) - shape) / math.sqrt(shape)
    upper = (special.gammainccinv(shape, tail) - shape) / math.sqrt(shape)
    return _frozen(np.concatenate([lower, upper]))


def _frozen(table: NDArray[np.float64]) -> NDArray[np.float64]:
    table.flags.writeable = False
    return table
