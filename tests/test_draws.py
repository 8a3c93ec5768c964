"""Counter-based randomness: a uniform, uncorrelated hash, and quantile tables of the distributions they name."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from paceenv.sim.engine import compiled, draws
from paceenv.sim.engine.code_cache import numba_cache
from paceenv.sim.engine.simulator import episode_keys


def jitted(function: Callable[..., Any]) -> Any:
    """Compiled, and kept as the engine is; importing the engine is what lets it call draws compiled."""
    with numba_cache(compiled.cache_directory()) as writable:
        return numba.njit(cache=writable)(function)


rank_bits = jitted(lambda keys, ranks: np.array([draws.bits32(key, r) for key in keys for r in range(ranks)]))
uniforms = jitted(lambda key, stream, count: np.array([draws.uniform(key, stream, i) for i in range(count)]))
quantiles = jitted(lambda table, bits_N: np.array([draws.quantile(table, bits) for bits in bits_N]))
geometrics = jitted(lambda u_N, probability: np.array([draws.geometric(u, probability) for u in u_N]))


@jitted
def normals(key: Any, stream: int, iterations: int, table: NDArray[np.float64], ranks: int) -> NDArray[np.float64]:
    """As the engine draws them: one key an iteration, one hash a rank."""
    out, bits_R = np.empty((iterations, ranks)), np.empty(ranks, np.uint32)
    for t in range(iterations):
        draws.quantiles(draws.key_of(key, stream, t), table, bits_R, out[t])
    return out


KEY = episode_keys([12345])[0]


def test_mixer_is_the_published_splitmix64() -> None:
    # first outputs of the reference generator with seed 0: the mixer applied to multiples of the golden gamma
    states = np.arange(1, 4, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    assert [hex(x) for x in draws.mix64(states)] == ["0xe220a8397b1dcdaf", "0x6e789e6aa1b965f4", "0x6c45d188009454f"]


@pytest.mark.parametrize("first", [0, 2**63])
def test_rank_hash_is_uniform_in_every_bit_and_byte(first: int) -> None:
    # a few ranks under many iterations' keys, as the engine uses it
    bits = rank_bits(draws.mix64(np.uint64(first) + np.arange(20_000, dtype=np.uint64)), 8).ravel()
    ones = np.unpackbits(bits.view(np.uint8)).reshape(-1, 32).mean(axis=0)
    assert np.abs(ones - 0.5).max() < 4.5 * 0.5 / math.sqrt(len(bits))
    for shift in (0, 8, 16, 24):
        counts = np.bincount((bits >> np.uint32(shift)) & np.uint32(0xFF), minlength=256)
        assert stats.chisquare(counts).pvalue > 1e-4


@pytest.mark.parametrize("stream", [draws.JITTER, draws.TENANT])
def test_uniforms_are_uniform_and_serially_uncorrelated(stream: int) -> None:
    u = uniforms(KEY, stream, 100_000)
    assert u.min() > 0.0
    assert u.max() < 1.0
    assert stats.kstest(u, "uniform").pvalue > 1e-3
    assert stats.chisquare(np.histogram2d(u[:-1], u[1:], bins=16)[0].ravel()).pvalue > 1e-4


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ((0, draws.JITTER, 0, 0), (0, draws.JITTER, 0, 1)),
        ((0, draws.JITTER, 0, 0), (0, draws.JITTER, 1, 0)),
        ((0, draws.JITTER, 0, 0), (0, draws.IMBALANCE, 0, 0)),
        ((0, draws.JITTER, 0, 0), (1, draws.JITTER, 0, 0)),
        ((0, draws.JITTER, 0, 0), (0, draws.JITTER, 1, 1)),
    ],
    ids=["next rank", "next iteration", "other stream", "next seed", "next rank and iteration"],
)
def test_neighbouring_draws_are_uncorrelated(a: tuple[int, int, int, int], b: tuple[int, int, int, int]) -> None:
    count, ranks = 3000, 16
    table = draws.normal_table()

    def drawn(seed: int, stream: int, later: int, shifted: int) -> NDArray[np.float64]:
        key = episode_keys([seed])[0]
        return normals(key, stream, count + later, table, ranks + shifted)[later:, shifted:]

    x, y = drawn(*a)[:, :ranks], drawn(*b)[:, :ranks]
    limit = 4.5 / math.sqrt(count * ranks)
    assert abs(np.corrcoef(x.ravel(), y.ravel())[0, 1]) < limit
    assert abs(np.corrcoef(np.abs(x).ravel(), np.abs(y).ravel())[0, 1]) < limit


def test_episode_keys_differ_between_seeds_and_episodes() -> None:
    seeds, episodes = np.meshgrid(np.arange(200), np.arange(200))
    keys = episode_keys(seeds.ravel().astype(np.uint64), episodes.ravel())
    assert len(np.unique(keys)) == keys.size
    assert episode_keys([7], 3)[0] == episode_keys([1, 7], 3)[1], "a row's key is its own"


def test_stream_numbers_are_part_of_the_model_s_identity() -> None:
    streams = "JITTER IMBALANCE DRIFT COMMON PERSISTENT SLOW_RANK FAIL_SLOW STALL POST_WORK TENANT OBSERVER CLUSTER"
    assert [getattr(draws, name) for name in streams.split()] == list(range(1, 13))
    assert KEY == 11952503897620521611


@pytest.mark.parametrize("skewness", [0.0, 0.05, 1.0, 4.0])
def test_quantile_tables_against_scipy(skewness: float) -> None:
    """The normal and the gamma, over all octaves of both tails: 31 bits say how far out, the top one on which side."""
    tail = np.unique(np.round(2.0 ** np.linspace(0, 31, 4000)).astype(np.uint64) - 1)
    bits = np.concatenate([tail, tail + (1 << 31)]).astype(np.uint32)
    share = (2.0 * (bits & np.uint32(0x7FFFFFFF)) + 1.0) / 2.0**33
    probability = np.where(bits >> np.uint32(31), 1.0 - share, share)
    exact = stats.pearson3.ppf(probability, skewness) if skewness else stats.norm.ppf(probability)
    within = {"atol": 4e-4, "rtol": 4e-4} if skewness else {"atol": 2e-4}
    np.testing.assert_allclose(quantiles(draws.gamma_table(skewness), bits), exact, **within)


@pytest.mark.parametrize("p", [0.9, 0.01, 1e-5])
def test_geometric_has_mean_one_over_p(p: float) -> None:
    n = geometrics(uniforms(KEY, draws.FAIL_SLOW, 50_000), p)
    assert n.min() >= 1
    assert n.mean() == pytest.approx(1 / p, abs=4.5 * n.std() / math.sqrt(len(n)))
    assert (n == 1).mean() == pytest.approx(p, abs=4.5 * math.sqrt(p * (1 - p) / len(n)))
    assert 1 << 61 < draws.geometric(1e-300, 1e-300) <= 1 << 62, "the smallest arguments fit 64 bits"
