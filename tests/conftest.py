"""Shared by the tests: a simulator straight from engine parameters; tests marked ``gpu`` need a device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from gpu_page import device_facts, gpu_page
from hypothesis import HealthCheck, settings

from paceenv.core.limits import OPEN
from paceenv.sim.cluster.derive import ideal_step_s
from paceenv.sim.engine import layout
from paceenv.sim.engine.simulator import JobBatch, Simulator, episode_keys

EVERY_NOISE: dict[str, Any] = {"jitter_cv": 0.02, "common_cv": 0.01, "imbalance_cv": 0.05, "skewness": 1.0}
EVERY_NOISE |= {"persistent_cv": 0.02, "slow_ranks": 1, "slow_factor": 1.2, "fail_slow_share": 0.1}
EVERY_NOISE |= {"fail_slow_mean_iterations": 10.0, "fail_slow_factor": 1.5, "drift_cv": 0.02}
EVERY_NOISE |= {"drift_iterations": 50.0, "stall_rate": 0.01, "transfer_cv": 0.05, "stall_mean_s": 0.3}
"""Engine parameters with every kind of noise on."""

for _profile, _examples in {"quick": 20, "thorough": 200}.items():  # chosen with --hypothesis-profile
    settings.register_profile(  # no timing is asserted in a test
        _profile, max_examples=_examples, deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
settings.load_profile("quick")


_STARTS_PROCESSES = frozenset(("run_ranks", "commands", "python", "DEADLINE_S"))
"""What a test module imports if its tests start processes that share the machine's cores with others: where these were
kept from running for a while a test may fail once. It is tried a second time, and the summary says so."""


def build_simulator(
    seeds: Sequence[int] = (0,),
    *,
    ranks: int = 1,
    groups: int = 1,
    tenants: Sequence[dict[str, Any]] = (),
    skewness: float = 0.0,
    threads: int = 1,
    cap_s: float = 1.0,
    **job: Any,
) -> Simulator:
    """One job per seed: 1 s of compute, everything else off unless ``job`` names it; ``tenants`` are records too.

    Delays have no limits but ``cap_s``.
    """
    jobs = layout.default_job(len(seeds))
    jobs["compute_s"], jobs["imbalance_skew"] = 1.0, skewness
    for name, value in job.items():
        jobs[name] = value
    jobs["ideal_step_s"] = ideal_step_s(jobs)
    records = np.zeros((len(seeds), len(tenants)), layout.TENANT)
    for k, tenant in enumerate(tenants):
        usual = {"rate_cap": 1.0, "weight": 1.0, "ranks": 1.0, "pause_periods": 1.0, "late_share": 1.0}
        for name, value in (usual | tenant).items():
            records[name][:, k] = value
    batch = JobBatch(jobs, records, ranks, groups)
    return Simulator(batch, episode_keys(list(seeds)), threads, replace(OPEN, cap_s=cap_s))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """First what compiles the engine for one collective, what needs none, and what compiles it for programs.

    So each of two workers compiles one half, not both the whole. Long files follow, so that they end together.
    """
    first = (
        "test_engine",
        "test_live_launch",
        "test_program",
        "test_sweep_ray",
        "test_documentation",
        "test_installed",
    )
    items.sort(key=lambda item: first.index(item.path.stem) if item.path.stem in first else len(first))
    for item in items:
        if not _STARTS_PROCESSES.isdisjoint(vars(item.module)):  # type: ignore[attr-defined]
            item.add_marker(pytest.mark.flaky(reruns=1))


@pytest.fixture(scope="session")
def simulator() -> Callable[..., Simulator]:
    """:func:`build_simulator`; session-wide, so that Hypothesis tests may use it."""
    return build_simulator


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Where tests ran on a GPU, print what they found as a page for ``docs/evidence/gpu.md``."""
    found = [r for outcome in ("passed", "failed", "skipped") for r in terminalreporter.getreports(outcome)]
    reports = [r for r in found if "gpu" in r.keywords and (r.when == "call" or r.outcome != "passed")]
    if any(r.when == "call" for r in reports):
        terminalreporter.section("page for docs/evidence/gpu.md")
        terminalreporter.write_line(gpu_page(sorted(reports, key=lambda r: r.location), device_facts()))


@pytest.fixture(autouse=True)
def _gpu(request: pytest.FixtureRequest) -> None:
    """A test marked ``gpu`` is skipped, and says why, where there is no device."""
    if request.node.get_closest_marker("gpu"):
        import torch

        if torch.cuda.device_count() == 0:
            pytest.skip("torch finds no CUDA device")
