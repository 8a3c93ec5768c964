"""The shared uplink: cases solved by hand and closed forms; the referee has the rest."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

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


# Closed forms
