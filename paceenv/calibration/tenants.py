"""A tenant on the uplink, seen in the durations of our payload: how often it comes, for how long, where it is now.

There is a tenant if what the links leave of the durations comes and goes. The engine's tenant is then followed through
the recorded arrivals by a particle filter, which gives a likelihood of its period and share and of our own time alone.
Population Monte Carlo (Cappe et al., JCGS 2004) gives their posterior, in which several periods with the same beat
survive side by side. The prior says that the other job is like ours, within wide bounds; it decides only between such
periods.

Axes: T iterations, G process groups, N particles.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

import numba
import numpy as np
from numpy.typing import NDArray
from scipy import stats

from paceenv.calibration.cluster_builder import GOOD_CV, GOOD_MEAN, ClusterBuilder, simulate
from paceenv.calibration.job_stamps import JobStamps
from paceenv.calibration.link_replay import PayloadFit, transfer_cv
from paceenv.calibration.parameters import Parameter, bounded, identified, not_identifiable
from paceenv.core.intervals import Interval
from paceenv.core.metrics import other_job
from paceenv.sim.cluster import Cluster
from paceenv.sim.cluster.derive import derive
from paceenv.sim.engine import compiled, fluid, layout
from paceenv.sim.engine.code_cache import numba_cache
from paceenv.sim.engine.draws import normal_table
from paceenv.sim.engine.simulator import episode_keys

OUTLIERS: Final = 0.02
"""Share of durations that the tenant need not explain."""
JUMPS: Final = 0.005
"""Chance in an iteration that the tenant is somewhere else altogether, as after a pause."""
_KEYS: Final = ("tenants.0.period_ratio", "tenants.0.comm_share", "fabric.uplink_gbps")
MIN_OF_STEP: Final = 0.01
"""What varies by less of a step does not matter."""
MIN_JITTER: Final = 0.003
"""A tenant's own jitter, where ours is less: that of any computer."""
MAX_TRANSFER_CV: Final = 1.0
"""What a cluster config allows."""
MIN_EXPLAINED: Final = 0.2
"""A tenant that explains a smaller share of the durations' variance one iteration ahead is none."""
_TRUST = 0.03
"""How far off the modelled duration may be, standard deviation relative to the mean."""
_EFFECTIVE_ITERATIONS = 25.0
"""A trace counts as at most so many independent durations: what the model misses is alike in all, and the likelihood
of a particle filter is noisy (a coarsened posterior, Miller and Dunson, JASA 2019)."""
_LIKE_US = (0.3, 0.2)
"""Prior: the other job is like ours, by these standard deviations of the ratio's logarithm and of the share."""
_MAX_ITERATIONS = 200
_SCAN_ITERATIONS, _SCAN_PARTICLES, _SCAN_KEPT = 120, 64, 40
_PARTICLES, _POPULATION, _JUDGED = 96, 64, 16
_LAST_POPULATION = 160
"""More points in the last round, whose sample gives the interval."""
_RATIOS = np.exp(np.linspace(math.log(0.5), math.log(2.0), 47))
_SHARES = (0.1, 0.2, 0.35, 0.5)
_ALONE = (0.7, 0.85, 1.0)
"""Our time alone, relative to the shortest durations, in which the tenant may still have a part."""
_ROUNDS = (
    (4.0, np.array([0.010, 0.06, 0.05])),
    (2.0, np.array([0.007, 0.05, 0.04])),
    (1.0, np.array([0.005, 0.04, 0.03])),
)
"""Temperature of the weights by which points are chosen, and how far new ones lie from them."""
_WIDE = 3.0 * _ROUNDS[-1][1]
"""Over which the sample's density is smoothed."""

Array = NDArray[np.float64]


def _filter(
    jobs: Any,
    clocks: Any,
    tenants_EK: Any,
    tenant_NFK: Array,
    normal: Array,
    arrival_TG: Array,
    lasts_T: Array,
    advance_T: Array,
    uniform_TN: Array,
    spread_s: float,
    expected_T: Array,
) -> tuple[float, int]:
    particles, groups = tenant_NFK.shape[0], arrival_TG.shape[1]
    order_G, finish_G, weight_N = np.arange(groups), np.empty(groups), np.empty(particles)
    before_NFK, total, lost = np.empty_like(tenant_NFK), 0.0, 0
    for i in range(particles):
        fluid.reset_tenants(clocks[i], tenants_EK[0], tenant_NFK[i])
    for t in range(arrival_TG.shape[0]):
        fluid.sort(arrival_TG[t], order_G)
        mean, expected = 0.0, 0.0
        for i in range(particles):
            fluid.share_uplink(
                jobs[0], clocks[i], tenants_EK[0], tenant_NFK[i], normal, order_G, arrival_TG[t], finish_G
            )
            lasts_s = 0.0
            for g in range(groups):
                lasts_s += (finish_G[g] - arrival_TG[t, g]) / groups
            away = (lasts_s - lasts_T[t]) / spread_s
            weight_N[i] = (1.0 - OUTLIERS) * np.exp(-0.5 * away * away) + 0.05 * OUTLIERS
            mean += weight_N[i] / particles
            expected += lasts_s / particles
        total += np.log(mean)
        expected_T[t] = expected
        before_NFK[:] = tenant_NFK
        is_lost = mean < 0.1 * OUTLIERS  # no particle near: the tenant itself stood still, or jumped
        lost += is_lost
        at, reached = 0, weight_N[0] / particles / mean
        for i in range(particles):  # systematic resampling
            while reached < (i + uniform_TN[t, 0]) / particles and at < particles - 1:
                at += 1
                reached += weight_N[at] / particles / mean
            tenant_NFK[i] = before_NFK[at]
            fluid.rewind(clocks[i], tenant_NFK[i], advance_T[t])
            if uniform_TN[t, 1 + i] < (0.5 if is_lost else JUMPS):
                clocks[i]["key"] += np.uint64(particles)
                fluid.reset_tenants(clocks[i], tenants_EK[0], tenant_NFK[i])
    return total, lost


with numba_cache(compiled.cache_directory()) as _writable:
    _filter_compiled = numba.njit(nogil=True, cache=_writable, error_model="numpy")(_filter)


def add_tenants(builder: ClusterBuilder[Any]) -> None:
    """A tenant where durations show one, else why there is none and how much transfers vary by themselves."""
    payload, stamps = builder.payload, builder.stamps
    if payload is None:
        return
    mean_s, residual_T = float(stamps.duration_TG.mean()), payload.own.residual_TG.mean(axis=1)
    predictable, inflated, is_there = other_job(mean_s + residual_T[stamps.steady_T])
    said = (
        f"durations are {inflated:.1%} longer than the best, predicted by their past with correlation {predictable:.2f}"
    )
    matters = float(residual_T.std()) > MIN_OF_STEP * builder.measured.mean_s
    if is_there and matters and payload.unit_whole_s > 0.0:
        if TenantSearch(builder, payload).add():
            return
        said = "durations vary in a way that no one periodic tenant explains"
    builder.add(not_identifiable("tenants", 0.0, said, "none assumed"))
    cv, se = transfer_cv(payload.own, stamps.duration_TG, stamps.steady_T)
    said = "what each group's payloads differ from the links' model"
    if cv > MAX_TRANSFER_CV:
        said += f": {cv:.3g}, of which the simulator has {MAX_TRANSFER_CV:g} at most"
    builder.put(identified("noise.transfer_cv", min(cv, MAX_TRANSFER_CV), se, said))


class TenantSearch:
    """What is known of a tenant at ``theta``: logarithm of its period ratio, its share, logarithm of our time alone."""

    def __init__(self, builder: ClusterBuilder[JobStamps], payload: PayloadFit) -> None:
        self.builder, self.stamps, self.payload = builder, builder.stamps, payload
        noise, mean_T = builder.data["noise"], self.stamps.duration_TG.mean(axis=1)
        self.jitter = max(noise["jitter_cv"], noise["imbalance_cv"], MIN_JITTER)
        self.lasts_T = mean_T - payload.latency_s
        self.advance_T = np.append(np.diff(self.stamps.begin_T), self.stamps.step_T[-1])
        self.alone_s = float(np.quantile(mean_T, 0.02)) - payload.latency_s

    def cluster(self, theta: Array) -> Cluster:
        """The uplink is what the payload of all groups fills when no tenant transfers."""
        ratio, share, whole_s = _natural(theta)
        tenant = {"period_ratio": ratio, "comm_share": share, "ranks": self.stamps.ranks, "jitter_cv": self.jitter}
        whole, alone = (unit_s / whole_s for unit_s in (self.payload.unit_whole_s, self.payload.unit_alone_s))
        rates, data = {"uplink_gbps": whole, "nic_gbps": alone * self.payload.cap}, self.builder.data
        return self.builder.parse(data | {"tenants": [tenant], "fabric": data["fabric"] | rates})

    def misfit(self, theta: Array) -> float:
        """Of mean step and CV, in units of what counts as a good fit and of what one run differs from another."""
        measured, simulated = self.builder.measured, simulate(self.cluster(theta), len(self.stamps.step_T))
        mean = (simulated.mean_s - measured.mean_s) / math.hypot(GOOD_MEAN * simulated.mean_s, simulated.mean_sd)
        return math.hypot(mean, (simulated.cv - measured.cv) / math.hypot(GOOD_CV, simulated.cv_sd))

    def follow(
        self, theta: Array, iterations: int = _MAX_ITERATIONS, particles: int = _PARTICLES
    ) -> tuple[float, Array, int]:
        """Log-likelihood of the last iterations, durations expected one iteration ahead ``(T,)``, how often it is lost.

        By a bootstrap particle filter (Gordon, Salmond and Smith, IEE Proceedings F 1993). Each particle is a tenant as
        the engine draws it, from a random phase. Its weight is how well our payload's mean duration under the recorded
        arrivals agrees with the measured one: normal, with a share of outliers.
        """
        last, batch = slice(-iterations, None), derive(self.cluster(theta), episode_keys([0]))
        arrival_TG, lasts_T = np.ascontiguousarray(self.stamps.arrival_TG[last]), self.lasts_T[last]
        clocks = np.zeros(particles, layout.CLOCK)
        clocks["key"] = episode_keys(list(range(particles)))
        tenant_NFK, expected_T = np.zeros((particles, layout.TENANT_FIELDS, 1)), np.empty(len(lasts_T))
        uniform_TN = np.random.default_rng(0).uniform(size=(len(lasts_T), 1 + particles))
        tenants = (batch.jobs, clocks, batch.tenants_EK, tenant_NFK, normal_table())
        spread_s = _TRUST * float(self.lasts_T.mean())
        stamps = (arrival_TG, lasts_T, self.advance_T[last], uniform_TN)
        likelihood, lost = _filter_compiled(*tenants, *stamps, spread_s, expected_T)
        return float(likelihood), expected_T, int(lost)

    def cost(self, theta: Array) -> float:
        """Minus twice the logarithm of prior and coarsened likelihood."""
        own_share = self.alone_s / float(np.median(self.stamps.step_T))
        if not (abs(theta[0]) < 1.1 and 0.02 < theta[1] < 0.9 and abs(theta[2] - math.log(self.alone_s)) < 0.7):
            return math.inf
        prior = (theta[0] / _LIKE_US[0]) ** 2 + ((theta[1] - own_share) / _LIKE_US[1]) ** 2
        counts = min(1.0, _EFFECTIVE_ITERATIONS / min(len(self.lasts_T), _MAX_ITERATIONS))
        return float(prior) - 2.0 * counts * self.follow(theta)[0]

    def sample(self) -> Array:
        grid = np.array(
            [[math.log(r), share, math.log(self.alone_s * own)] for r in _RATIOS for share in _SHARES for own in _ALONE]
        )
        scanned = [self.follow(theta, _SCAN_ITERATIONS, _SCAN_PARTICLES)[0] for theta in grid]
        return _posterior(self.cost, grid[np.argsort(scanned)[-_SCAN_KEPT:]], np.random.default_rng(0))

    def best(self, sample: Array) -> Array:
        """Where the posterior is dense and the cluster has little misfit.

        Two jobs lock into each other by small differences of their periods, which the posterior does not show.
        """
        density = np.log(_near(sample[:_JUDGED], sample, _WIDE).mean(axis=1))
        judged = [self.misfit(theta) ** 2 for theta in sample[:_JUDGED]]
        densest: Array = sample[int(np.argmin(judged - 2.0 * density))]
        return densest

    def add(self) -> bool:
        """Fit the tenant and take it into the cluster; False if none explains the durations."""
        if self.alone_s <= 0.0:
            return False
        sample = self.sample()
        at = self.best(sample)
        _, expected_T, lost = self.follow(at)
        lasts_T, iterations = self.lasts_T[-_MAX_ITERATIONS:], len(expected_T)
        explained = 1.0 - float(np.mean((lasts_T - expected_T) ** 2)) / float(lasts_T.var())
        if explained < MIN_EXPLAINED:
            return False
        said = (
            f"particle filter through the trace's own arrivals, which expects {explained:.0%} of the durations' "
            "variance one iteration ahead; of the posterior what comes nearest to mean and CV of the step; without the "
            f"tenant the payload takes {_natural(at)[2]:.4g} s"
        )
        found = np.array([_natural(theta) for theta in (at, *sample)])
        found[:, 2] = self.payload.unit_whole_s / found[:, 2]
        value_P, sd_P = found[0], found[1:].std(axis=0)
        low_P, high_P = np.quantile(found[1:], [0.025, 0.975], axis=0)
        low_P, high_P = np.minimum(low_P, value_P), np.maximum(high_P, value_P)
        ratio, share, uplink = (
            Parameter(key, value, sd, low, high, said)
            for key, value, sd, low, high in zip(
                _KEYS, *(x.tolist() for x in (value_P, sd_P, low_P, high_P)), strict=True
            )
        )
        often = Interval(lost / iterations, *stats.binomtest(lost, iterations).proportion_ci())
        pauses = bounded("tenants.0.pause_rate", often, "chance a period, by how often the filter loses sight of it")
        best = self.cluster(at)
        self.builder.data["tenants"] = [t.model_dump() | {"pause_rate": pauses.value} for t in best.tenants]
        self.builder.data["fabric"] |= {"nic_gbps": best.fabric.nic_gbps, "uplink_gbps": best.fabric.uplink_gbps}
        self.builder.drop(["fabric.nic_gbps", "fabric.uplink_gbps"])
        why = "with a tenant on the uplink, whether a group's own links limit it as well"
        nic_gbps, source = self.builder.data["fabric"]["nic_gbps"], "assumed not to limit beyond the uplink"
        stays = "a tenant that takes less of the uplink for longer slows us alike"
        self.builder.add(
            uplink,
            not_identifiable("fabric.nic_gbps", nic_gbps, why, source),
            ratio,
            share,
            not_identifiable("tenants.0.rate_share", 1.0, stays, "assumed to take what it gets"),
            pauses,
        )
        return True


def _natural(theta: Array) -> tuple[float, float, float]:
    return math.exp(theta[0]), float(theta[1]), math.exp(theta[2])


def _posterior(cost: Callable[[Array], float], points: Array, rng: np.random.Generator) -> Array:
    """An equally weighted sample of the posterior ``(samples, P)``.

    Points around the better ones of those so far, ever closer; the last ones with importance weights. ``cost`` is minus
    twice the log-likelihood of the logarithm of the ratio, the share, and the logarithm of the time alone.
    """
    costs = np.array([cost(theta) for theta in points])
    for temperature, near in _ROUNDS:
        chance = _weights(costs / temperature)
        count = _LAST_POPULATION if near is _ROUNDS[-1][1] else _POPULATION
        centre = points[rng.choice(len(points), count, p=chance)]
        new = centre + near * rng.standard_normal(centre.shape)
        proposal = _near(new, points, near) @ chance
        new_costs = np.array([cost(theta) for theta in new])
        points, costs = np.concatenate([points, new]), np.concatenate([costs, new_costs])
    weight = _weights(new_costs + 2.0 * np.log(np.maximum(proposal, 1e-300)))
    return np.asarray(new[rng.choice(len(new), 1000, p=weight)])


def _near(a: Array, b: Array, kernel: Array) -> Array:
    """The normal kernel between every two points."""
    away = (a[:, None, :] - b[None, :, :]) / kernel
    return np.asarray(np.exp(-0.5 * (away**2).sum(axis=2)))


def _weights(costs: Array) -> Array:
    weight = np.exp(-(costs - costs.min()) / 2.0)
    normalised: Array = weight / weight.sum()
    return normalised
