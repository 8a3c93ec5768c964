"""The engine: closed forms of every noise type, and that nothing depends on how a batch is run."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from conftest import EVERY_NOISE
from numpy.typing import NDArray
from scipy import integrate, stats

from paceenv.cli import application
from paceenv.core import pacing, timing
from paceenv.sim.engine import compiled, draws, layout, measuring
from paceenv.sim.engine.simulator import Simulator, episode_keys

Make = Callable[..., Simulator]
Floats = NDArray[np.float64]

COUPLED: dict[str, Any] = {"ranks": 8, "groups": 4, "uplink_work_s": 0.1, "has_barrier": True, "post_work_share": 0.2}
COUPLED |= {"post_work_mean_iterations": 20.0, "post_work_episode_s": 0.3, "post_work_spread": 0.5}
COUPLED |= {"tenants": [{"compute_s": 1.0, "uplink_work_s": 0.3, "jitter_cv": 0.02, "ranks": 4, "weight": 2.0}]}


def computed_ETR(sim: Simulator, iterations: int) -> Floats:
    """Compute times without pacing: entry into the collective, seconds from the last step's end."""
    return sim.record(sim.off(), iterations).entry_ETR


def assert_mean(samples: Floats, expected: float, sigmas: float = 4.5) -> None:
    """The mean of independent samples, within its own Monte Carlo error."""
    error = samples.std() / math.sqrt(samples.size)
    assert samples.mean() == pytest.approx(expected, abs=sigmas * error + 1e-12), f"error {error}"


# Noise by cause


@pytest.mark.parametrize("cv", [0.01, 0.1])
def test_jitter_is_normal_and_a_step_its_maximum(simulator: Make, cv: float) -> None:
    ranks = 16
    sim = simulator(range(50), ranks=ranks, jitter_cv=cv, compute_s=2.0)
    x = computed_ETR(sim, 200) / 2.0
    assert_mean(x.ravel(), 1.0)
    assert x.std() == pytest.approx(cv, rel=0.01)
    step = x.max(axis=2).ravel()
    below, _ = integrate.quad(lambda z: 1.0 - stats.norm.cdf(z) ** ranks, -7.0, 7.0, limit=400)
    assert_mean(step, 1.0 + cv * (below - 7.0))


@pytest.mark.parametrize("slow", [1, 3])
def test_slow_ranks_are_neighbours_anywhere_in_the_job(simulator: Make, slow: int) -> None:
    sim = simulator(range(800), ranks=8, slow_ranks=slow, slow_factor=2.35)
    x = computed_ETR(sim, 2)
    slow_factor = float(np.float32(2.35))  # kept as float32
    is_slow_ER = x[:, 0] == slow_factor
    assert ((x == 1.0) | (x == slow_factor)).all()
    assert (is_slow_ER.sum(axis=1) == slow).all()
    first_E = np.flatnonzero(is_slow_ER & ~np.roll(is_slow_ER, 1, axis=1)) % 8
    assert stats.chisquare(np.bincount(first_E, minlength=8)).pvalue > 1e-3


@pytest.mark.parametrize(("share", "mean_iterations"), [(0.1, 100.0), (0.3, 40.0), (0.3, 3.0)])
def test_fail_slow_episodes_have_their_share_from_the_start(
    simulator: Make, share: float, mean_iterations: float
) -> None:
    sim = simulator(
        range(500), ranks=8, fail_slow_share=share, fail_slow_mean_iterations=mean_iterations, fail_slow_factor=3.0
    )
    x = computed_ETR(sim, 400)
    assert ((x == 1.0) | (x == 3.0)).all()
    assert_mean((x[:, 0] == 3.0).ravel(), share)
    assert_mean((x == 3.0).mean(axis=1).ravel(), share)


def test_drift_is_an_ornstein_uhlenbeck_process(simulator: Make) -> None:
    tau = 20.0
    sim = simulator(range(40), ranks=16, drift_cv=0.05, drift_iterations=tau)
    x = computed_ETR(sim, 1500) - 1.0
    assert x[:, 0].std() == pytest.approx(0.05, rel=0.1), "stationary from the start"
    assert_mean((x**2).mean(axis=1).ravel(), 0.05**2)
    for lag in (1, 10, 20, 60):
        product = (x[:, lag:] * x[:, :-lag]).mean(axis=1) / 0.05**2
        assert_mean(product.ravel(), math.exp(-lag / tau))
    across = (x[:, :, 0] * x[:, :, 1]).mean(axis=1) / 0.05**2
    assert_mean(across, 0.0)


def test_stalls_have_their_rate_and_are_exponential(simulator: Make) -> None:
    sim = simulator(range(20), ranks=8, stall_rate=0.02, stall_mean_s=0.3)
    extra = computed_ETR(sim, 2000) - 1.0
    assert_mean((extra > 0).ravel().astype(np.float64), 0.02)
    assert stats.kstest(extra[extra > 0], stats.expon(scale=0.3).cdf).pvalue > 1e-3
    assert stats.chisquare((extra > 0).sum(axis=(0, 1))).pvalue > 1e-3, "every rank alike"


def test_common_persistent_and_imbalance_noise_have_their_laws(simulator: Make) -> None:
    common, persistent, imbalance = (
        computed_ETR(simulator(range(300), ranks=8, **noise), 20) - 1.0
        for noise in ({"common_cv": 0.1}, {"persistent_cv": 0.1}, {"imbalance_cv": 0.1, "skewness": 1.0})
    )
    assert (common == common[:, :, :1]).all(), "of all ranks"
    assert (persistent == persistent[:, :1]).all(), "of all steps"
    assert stats.kstest(common[:, :, 0].ravel(), stats.norm(scale=0.1).cdf).pvalue > 1e-3
    assert stats.kstest(persistent[:, 0].ravel(), stats.norm(scale=0.1).cdf).pvalue > 1e-3
    assert stats.kstest(imbalance.ravel(), stats.pearson3(1.0, scale=0.1).cdf).pvalue > 1e-3


def test_all_noise_together_is_what_each_cause_does_alone(simulator: Make) -> None:
    """Some causes stretch what others add up to; a stall comes on top."""
    added = [{"jitter_cv": 0.1}, {"imbalance_cv": 0.1, "skewness": 1.0}, {"drift_cv": 0.1, "drift_iterations": 20.0}]
    slow = {"persistent_cv": 0.1, "slow_ranks": 1, "slow_factor": 1.5}
    fails = {"fail_slow_share": 0.2, "fail_slow_mean_iterations": 10.0, "fail_slow_factor": 2.0}
    times, stalls = [{"common_cv": 0.1}, slow, fails], {"stall_rate": 0.05, "stall_mean_s": 0.3}
    everything = {name: value for cause in (*added, *times, stalls) for name, value in cause.items()}
    alone = [computed_ETR(simulator(range(9), ranks=8, **cause), 100) for cause in (*added, *times, stalls, everything)]
    expected = np.prod(alone[3:6], axis=0) * (sum(alone[:3]) - 2.0) + alone[6] - 1.0
    np.testing.assert_allclose(alone[7], expected, rtol=1e-5)


def test_transfers_vary_by_a_share_of_their_duration_and_keep_the_link_busy_as_before(simulator: Make) -> None:
    """Every group's by a factor of its own; the compute before it, and what the fluid says, stay as they are."""
    setup: dict[str, Any] = {"ranks": 8, "groups": 4, "jitter_cv": 0.02, "has_barrier": True}
    setup |= {"transfer_alone_s": 0.2, "uplink_work_s": 0.1}
    sims = [simulator(range(20), **setup, transfer_cv=cv) for cv in (0.0, 0.1)]
    even, uneven = (sim.record(sim.off(), 400) for sim in sims)
    np.testing.assert_array_equal(uneven.entry_ETR, even.entry_ETR)
    arrival_ETG = even.entry_ETR.reshape(20, 400, 4, 2).max(axis=3)
    factor = (uneven.finish_ETG - arrival_ETG) / (even.finish_ETG - arrival_ETG)
    assert_mean(factor.ravel(), 1.0)
    assert_mean((factor.ravel() - 1.0) ** 2, 0.01)
    assert abs(np.corrcoef(factor.reshape(-1, 4).T)[0, 1:]).max() < 0.05
    assert abs(np.corrcoef(factor[:, 1:].ravel(), factor[:, :-1].ravel())[0, 1]) < 0.05


@pytest.mark.parametrize("mean_iterations", [50.0, 3.0])
def test_post_work_episodes_have_share_and_size(simulator: Make, mean_iterations: float) -> None:
    sim = simulator(
        range(500), ranks=4, groups=4, has_barrier=True, compute_s=1.0,
        post_work_share=0.2, post_work_mean_iterations=mean_iterations, post_work_episode_s=0.5, post_work_spread=0.5,
    )  # fmt: skip
    rec = sim.record(sim.off(), 400)
    exposed = rec.ready_ETG - rec.finish_ETG
    assert_mean((exposed > 0).mean(axis=1).ravel(), 0.2)
    assert_mean((exposed[:, 0] > 0).ravel(), 0.2)
    sizes = exposed[:, 0][exposed[:, 0] > 0] / 0.5
    assert stats.kstest(sizes, stats.uniform(0.5, 1.0).cdf).pvalue > 1e-3
    within = (exposed[:, 1:] > 0) & (exposed[:, :-1] > 0)
    follows = 0.2 / (mean_iterations * 0.8 + 0.2)  # a new episode may follow at once, with a size of its own
    changes = (np.abs(np.diff(exposed, axis=1)[within]) > 1e-9).mean()
    assert changes == pytest.approx(follows / mean_iterations, abs=0.3 * follows), "one size throughout an episode"
    together = (exposed[:, :, 0] > 0) & (exposed[:, :, 1] > 0)
    assert_mean(together.mean(axis=1), 0.04)


# What a rank and a tenant do by themselves


def test_a_rank_wakes_up_late_measures_with_errors_and_misses_steps() -> None:
    job, key, ranks = layout.default_job(1)[0], episode_keys([3])[0], 4000
    job["late_wake_s"], job["stamp_noise_s"], job["missing_share"] = 0.004, 0.001, 0.1
    delay_R, rank_FR = np.float32([0.1] * ranks), np.ones((timing.RANK_FIELDS, ranks), np.float32)
    comm_R, wait_R, aside_FR = np.float32([1.0] * ranks), np.float32([0.0] * ranks), np.zeros_like(rank_FR)
    with np.errstate(over="ignore"):
        measuring.keep_missing(job, key, 49, rank_FR, aside_FR)
        measuring.delay_imperfectly(job, key, 50, delay_R)
        measuring.blur(job, key, 50, draws.normal_table(), comm_R, wait_R)
        assert not any(measuring.is_missing(job, key, measuring.FIRST_MISSING - 1, r) for r in range(ranks))
    missed_R = aside_FR.all(axis=0)
    assert_mean(missed_R.astype(np.float64), 0.1)
    np.testing.assert_array_equal(delay_R == 0.0, missed_R, err_msg="no delay after a step that was not measured")
    assert stats.kstest(delay_R[~missed_R] - 0.1, stats.expon(scale=0.004).cdf).pvalue > 1e-3
    assert stats.kstest(comm_R - 1.0, stats.norm(scale=0.001).cdf).pvalue > 1e-3
    assert_mean((wait_R > 0.0).astype(np.float64), 0.5)


@pytest.mark.parametrize(
    ("changes", "period_s"),
    [({}, 1.0), ({"bursty": True}, 1.0), ({"pause_rate": 0.1, "pause_periods": 10.0}, 1.0 + 0.1 * 10.0 / 2.0)],
    ids=["steady", "bursty", "pausing"],
)
def test_a_tenant_keeps_its_period_from_the_start(simulator: Make, changes: Any, period_s: float) -> None:
    tenant = {"compute_s": 0.6, "uplink_work_s": 0.2, "rate_cap": 0.5, **changes}
    sim = simulator(range(500), uplink_work_s=1e-6, tenants=[tenant])
    assert_mean((sim.state.tenant_ENK[:, layout.LEFT_S, 0] > 0.0).astype(np.float64), 0.4 / period_s)
    sim.run(sim.off(), 100)
    cycles_s = sim.outcome().time_s.sum() / sim.outcome().tenant_cycles_EK.sum()
    assert cycles_s == pytest.approx(period_s, rel=0.02)


# How a batch is run changes nothing


def test_recording_changes_nothing(simulator: Make) -> None:
    plain, recorded = (simulator(range(3), **EVERY_NOISE | COUPLED) for _ in range(2))
    settings = np.random.default_rng(0).uniform(0, 0.3, (3, 1, len(pacing.MECHANISMS), 2))
    np.testing.assert_array_equal(plain.run(settings, 50), recorded.record(settings, 50).step_ET)


# Misuse


@pytest.mark.parametrize("shape", [(1, 1, 3, 2), (2, 3, 3, 2), (2, 1, 2, 2), (2, 3, 2)])
def test_settings_of_a_wrong_shape_are_refused(simulator: Make, shape: tuple[int, ...]) -> None:
    sim = simulator([0, 1], ranks=4)
    with pytest.raises(ValueError, match=r"settings have shape .* expected \(2, 1 or 4"):
        sim.run(np.zeros(shape), 1)


# Compiling


def test_machine_code_is_ready_once_it_is_kept(tmp_path: Path) -> None:
    def advance() -> None:
        """A function that was not compiled in this process."""

    advance.overloads = {}  # type: ignore[attr-defined]
    advance.stats = SimpleNamespace(cache_path=str(tmp_path / "engine"))  # type: ignore[attr-defined]
    assert not compiled.is_ready(advance)
    for other in ("engine-of-another-checkout/kernel.advance-223", "engine/kernel.advance_programs-245"):
        (tmp_path / other).parent.mkdir()
        (tmp_path / f"{other}.py311.nbi").touch()
    assert not compiled.is_ready(advance)
    (tmp_path / "engine" / "kernel.advance-223.py311.nbi").touch()
    assert compiled.is_ready(advance)


def test_the_command_line_says_that_it_compiles(
    simulator: Make, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(logging.getLogger("paceenv.engine"), "handlers", [])
    monkeypatch.setattr("warnings.showwarning", None)
    monkeypatch.setattr("sys.argv", ["paceenv", "--version"])
    with pytest.raises(SystemExit):
        application.main()
    capsys.readouterr()
    sim = simulator()
    sim.run(sim.off(), 1)
    assert not capsys.readouterr().err
    monkeypatch.setattr(compiled, "is_ready", lambda function: False)
    sim.run(sim.off(), 1)
    assert capsys.readouterr().err.startswith("paceenv: compiling the engine for this machine")
