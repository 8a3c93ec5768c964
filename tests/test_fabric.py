"""The shared uplink: cases solved by hand and closed forms; the referee has the rest."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from paceenv.sim.engine import fluid, layout
from paceenv.sim.engine.draws import normal_table
from paceenv.sim.engine.simulator import Simulator

Make = Callable[..., Simulator]
Floats = NDArray[np.float64]
NOBODY = np.zeros(0, layout.TENANT), np.zeros((layout.TENANT_FIELDS, 0))


def finish(arrivals: list[float], work_s: float, alone_s: float = 0.0) -> Floats:
    """When our groups are through the uplink, in plain Python and without tenants."""
    job, clock = layout.default_job(1)[0], np.zeros(1, layout.CLOCK)[0]
    job["uplink_work_s"], job["transfer_alone_s"] = work_s, alone_s
    arrival_G = np.array(arrivals)
    out = np.empty(len(arrivals))
    fluid.share_uplink(job, clock, *NOBODY, normal_table(), np.argsort(arrival_G, kind="stable"), arrival_G, out)
    return out


# Solved by hand


def test_a_flow_alone_takes_its_work_or_its_own_links_time() -> None:
    assert finish([1.0], 0.5).tolist() == [1.5]
    assert finish([1.0], 0.5, 0.75).tolist() == [1.75]
    assert finish([1.0], 0.0, 0.75).tolist() == [1.75], "nothing leaves the leaf"


def test_two_flows_share_from_the_second_one_s_arrival() -> None:
    # alone for 1 s, then half each: 3 s of work left for the first, then 1 s for the second alone
    np.testing.assert_allclose(finish([0.0, 1.0], 4.0), [7.0, 8.0])
    np.testing.assert_allclose(finish([1.0, 0.0], 4.0), [8.0, 7.0], err_msg="whoever comes first")
    np.testing.assert_allclose(finish([0.0, 5.0], 4.0), [4.0, 9.0], err_msg="the first has left")


@pytest.mark.parametrize(
    ("tenant", "expected_s"),
    [
        ({"weight": 1.0}, 3.0),  # halves; both have 1 s of work left when we arrive
        ({"weight": 3.0}, 3.0),  # the tenant first, with 3/4, in 4/3 s; then our last 2/3 s of work alone
        ({"weight": 1 / 3}, 1 + 4 / 3),  # we first, with 3/4
        ({"weight": 1.0, "rate_cap": 0.25, "left": 3.0}, 1 + 4 / 3),  # it cannot take its half: 1/4, and 3/4 for us
        ({"weight": 1.0, "left": 1.0}, 2.0),  # it is through when we arrive
        ({"weight": 0.0}, 2.0),  # absent
    ],
    ids=["equal", "heavier", "lighter", "capped", "gone", "absent"],
)
def test_one_tenant_by_hand(simulator: Make, tenant: dict[str, float], expected_s: float) -> None:
    record = {"compute_s": 100.0, "uplink_work_s": 2.0} | {k: v for k, v in tenant.items() if k != "left"}
    sim = simulator(uplink_work_s=1.0, tenants=[record])
    if tenant["weight"] > 0.0:
        sim.state.tenant_ENK[0, layout.LEFT_S, 0] = tenant.get("left", 2.0)
    assert sim.run(sim.off(), 1)[0, 0] == pytest.approx(expected_s, rel=1e-12)


@pytest.mark.parametrize(
    ("starts_s", "left_s", "expected_s"),
    [
        (math.inf, 4.0, 4.0),  # it has 3 s of work left when we arrive, so we get a third of the uplink
        (1.5, 0.0, 2.25),  # it arrives when we have 0.5 s of work left, and we get two thirds
    ],
    ids=["we come late", "it comes late"],
)
def test_who_comes_late_gets_less(simulator: Make, starts_s: float, left_s: float, expected_s: float) -> None:
    record = {"compute_s": 100.0, "uplink_work_s": 4.0, "late_share": 0.5}
    sim = simulator(uplink_work_s=1.0, tenants=[record])
    sim.state.tenant_ENK[0, [layout.NEXT_S, layout.LEFT_S], 0] = starts_s, left_s
    assert sim.run(sim.off(), 1)[0, 0] == pytest.approx(expected_s, rel=1e-12)


# Closed forms


def test_a_tenant_left_alone_keeps_its_own_period(simulator: Make) -> None:
    tenant = {"compute_s": 0.7, "uplink_work_s": 0.1, "rate_cap": 0.5}
    sim = simulator(range(5), uplink_work_s=1e-9, tenants=[tenant])
    elapsed_E = sim.run(sim.off(), 3000).sum(axis=1)
    np.testing.assert_allclose(sim.state.tenant_ENK[:, layout.CYCLES, 0], elapsed_E / (0.7 + 0.2), atol=1.0)


def test_a_tenant_comes_and_goes(simulator: Make) -> None:
    """Pauses of up to 400 periods at one in 100: present a third of the time, from the first step to the last."""
    tenant = {"compute_s": 0.7, "uplink_work_s": 0.3, "pause_rate": 0.01, "pause_periods": 400.0}
    sim = simulator(range(1000), uplink_work_s=1e-9, tenants=[tenant])
    away_E = (sim.state.tenant_ENK[:, layout.LEFT_S, 0] == 0.0) & (sim.state.tenant_ENK[:, layout.NEXT_S, 0] > 0.7)
    assert away_E.mean() == pytest.approx(2.0 / 3.0, abs=4 * (2 / 9 / 1000) ** 0.5)
    rest_E = (sim.state.tenant_ENK[away_E, layout.NEXT_S, 0] - 0.7) / 400.0
    assert rest_E.mean() == pytest.approx(1.0 / 3.0, abs=0.04), "of a uniform pause that one looks into"
    sim.run(sim.off(), 1000)
    later_E = (sim.state.tenant_ENK[:, layout.LEFT_S, 0] == 0.0) & (sim.state.tenant_ENK[:, layout.NEXT_S, 0] > 0.7)
    assert later_E.mean() == pytest.approx(2.0 / 3.0, abs=4 * (2 / 9 / 1000) ** 0.5)


def test_a_bursty_tenant_is_a_renewal_process_of_exponential_bursts(simulator: Make) -> None:
    tenant = {"compute_s": 0.6, "uplink_work_s": 0.2, "rate_cap": 0.5, "bursty": True}
    sim = simulator(range(600), uplink_work_s=1e-9, tenants=[tenant])
    sim.run(sim.off(), 400)
    cycles_E = sim.state.tenant_ENK[:, layout.CYCLES, 0]
    mean_s, variance_s2 = 0.6 + 0.4, 0.6**2 + 0.4**2  # bursts last 0.4 s at half the uplink
    assert cycles_E.mean() == pytest.approx(400 / mean_s, rel=0.01)
    assert cycles_E.var() == pytest.approx(400 * variance_s2 / mean_s**3, rel=0.25)


def test_tenants_start_anywhere_in_their_period(simulator: Make) -> None:
    sim = simulator(
        range(1000), uplink_work_s=0.1, tenants=[{"compute_s": 0.6, "uplink_work_s": 0.2, "rate_cap": 0.5}] * 2
    )
    left, after = sim.state.tenant_ENK[:, layout.LEFT_S], sim.state.tenant_ENK[:, layout.NEXT_S]
    phase_EK = np.where(left > 0.0, 0.6 + 0.4 * (1.0 - left / 0.2), 0.6 - after)
    for k in range(2):
        assert stats.kstest(phase_EK[:, k], stats.uniform(0.0, 1.0).cdf).pvalue > 1e-3
    assert abs(np.corrcoef(phase_EK.T)[0, 1]) < 4.5 / math.sqrt(1000)
