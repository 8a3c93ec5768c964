"""Incast: a receiver's port by closed form, timeouts by their probability, and when a stagger pays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from paceenv.core import pacing
from paceenv.sim.engine.layout import ALL_TO_ALL, GATHER
from paceenv.sim.engine.simulator import Simulator

Make = Callable[..., Simulator]
SHALLOW, DEEP = 32768 / 14480, 262144 / 14480
PORT: dict[str, Any] = {"ranks": 8, "incast_kind": GATHER, "incast_flow_s": 0.05, "incast_fit": DEEP}


def test_without_loss_a_gather_takes_all_messages_one_after_the_other(simulator: Make) -> None:
    sim = simulator(**PORT)
    assert sim.run(sim.off(), 3) == pytest.approx(1.0 + 7 * 0.05)


def test_ports_of_an_all_to_all_work_side_by_side(simulator: Make) -> None:
    sim = simulator(**PORT | {"incast_kind": ALL_TO_ALL})
    assert sim.run(sim.off(), 3) == pytest.approx(1.0 + 7 * 0.05)


def test_groups_have_ports_of_their_own(simulator: Make) -> None:
    sim = simulator(**PORT | {"groups": 2, "has_barrier": True})
    assert sim.run(sim.off(), 3) == pytest.approx(1.0 + 3 * 0.05)


@pytest.mark.parametrize("kind", [GATHER, ALL_TO_ALL])
def test_late_ranks_share_the_port_as_a_fluid(simulator: Make, kind: int) -> None:
    """Against a brute-force fluid with small time steps."""
    sim = simulator([4], **PORT | {"incast_kind": kind, "jitter_cv": 0.1})
    recording = sim.record(sim.off(), 5)
    for t in range(5):
        arrival_R = recording.entry_ETR[0, t]
        receivers = range(8 if kind == ALL_TO_ALL else 1)
        start_RS = np.array([np.maximum(np.delete(arrival_R, r), arrival_R[r]) for r in receivers])
        left_RS, now_s, dt_s = np.full_like(start_RS, 0.05), start_RS.min(), 1e-5
        while (left_RS > 0).any():
            active_RS = (start_RS <= now_s) & (left_RS > 0)
            left_RS -= active_RS * (dt_s / np.maximum(active_RS.sum(axis=1, keepdims=True), 1))
            now_s += dt_s
        assert recording.finish_ETG[0, t, 0] == pytest.approx(now_s, abs=2e-4)


def test_a_shallow_buffer_times_out_as_often_as_its_overflow_says(simulator: Make) -> None:
    sim = simulator(range(400), **PORT | {"incast_fit": SHALLOW, "incast_timeout_s": 0.2})
    step = sim.run(sim.off(), 50)
    overflow = np.maximum(1.0 - SHALLOW / np.arange(1, 8), 0.0)
    expected = 1.0 - np.prod(1.0 - overflow**3)
    waited = step > 1.36
    assert waited.mean() == pytest.approx(expected, abs=4.5 * np.sqrt(0.25 / step.size))
    assert step[waited] == pytest.approx(1.55, abs=1e-9)
    assert step[~waited] == pytest.approx(1.35, abs=1e-9)


@pytest.mark.parametrize("fit", [7.0, DEEP, np.inf])
def test_a_buffer_that_holds_all_windows_never_times_out(simulator: Make, fit: float) -> None:
    sim = simulator(range(20), **PORT | {"incast_fit": fit, "incast_timeout_s": 0.2})
    assert sim.run(sim.off(), 100) == pytest.approx(1.35)


def stagger_gain(simulator: Make, **job: Any) -> float:
    """Mean step with the stagger rule over that without, on the same noise."""
    job = PORT | {"incast_flow_s": 0.07, "incast_timeout_s": 2.8, "jitter_cv": 0.03} | job
    passive, paced = (simulator(range(16), **job) for _ in range(2))
    settings = pacing.one_mechanism("stagger", 0.25, 0.42)[None, None].repeat(16, axis=0)
    return float(paced.run(settings, 2000).mean() / passive.run(passive.off(), 2000).mean())


def test_a_stagger_pays_in_a_gather_over_a_shallow_buffer(simulator: Make) -> None:
    assert stagger_gain(simulator, incast_fit=SHALLOW) < 0.65


def test_a_stagger_stays_off_where_the_buffer_is_deep(simulator: Make) -> None:
    assert stagger_gain(simulator, incast_fit=DEEP) == 1.0


def test_a_stagger_gives_up_in_an_all_to_all(simulator: Make) -> None:
    """A late rank still receives from all others at once, so a stagger only delays."""
    assert 1.0 <= stagger_gain(simulator, incast_fit=SHALLOW, incast_kind=ALL_TO_ALL) < 1.02
