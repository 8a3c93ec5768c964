"""Steps of described clusters when no rank is late and nobody else is on their links."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from paceenv.sim.cluster import Cluster
from paceenv.sim.cluster.derive import derive
from paceenv.sim.cluster.environment import Job
from paceenv.sim.cluster.fabric import Fabric
from paceenv.sim.cluster.program.footprint import laid
from paceenv.sim.cluster.program.program_tables import Start, StepPlan
from paceenv.sim.cluster.transfers import tiers_of, way_of
from paceenv.sim.engine.simulator import episode_keys


def node_bytes(plan: StepPlan, fabric: Fabric, job: Job) -> float:
    """What the busiest node sends through its NICs in a step of a program, bytes."""
    tiers, sent_N = tiers_of(fabric, job), np.zeros(job.nodes)
    for name, groups in plan.communicators.items():
        for members in groups:
            for start in plan.roles[plan.role_R[members[0]]]:
                if isinstance(start, Start) and start.communicator == name:
                    nodes = len({rank // job.ranks_per_node for rank in members})
                    way = way_of(job.algorithm, start.op, start.payload_bytes / start.parts, nodes)
                    one = laid(tiers, start.op, members, start.payload_bytes, way)
                    sent_N += one.load[tiers.nic_links][::2].reshape(job.nodes, -1).sum(axis=1)
    return float(sent_N.max())


def ideal_s(cluster: Cluster) -> float:
    """Its step without noise, seconds."""
    return float(derive(cluster, episode_keys([0])).jobs["ideal_step_s"][0])


@dataclass(frozen=True)
class Step:
    """A step of a described cluster when no rank is late and nobody else is on its links."""

    step_s: float
    gpus: int
    samples: float
    """Of the whole job."""
    kernel_flops: float
    """Of one GPU on average, also what backward computes anew."""
    kernel_s: float
    """Those FLOPs at the rate of its kernels."""
    nic_bytes: float
    """That the busiest node sends through its NICs."""

    @property
    def samples_per_s(self) -> float:
        """Of the whole job."""
        return self.samples / self.step_s

    @property
    def efficiency(self) -> float:
        """Kernel time as a share of the step."""
        return self.kernel_s / self.step_s


def step_of(cluster: Cluster, *settings: dict[str, Any]) -> Step:
    """The ideal step of a described cluster with ``key.sub: value`` settings applied."""
    one = cluster.changed([f"{key}={value}" for setting in settings for key, value in setting.items()])
    workload, gpu = one.workload, one.gpu
    assert workload is not None
    assert gpu is not None
    model, samples = workload.model, one.samples_per_step
    layer_flops = sum(tensor.flops for tensor in model.layer_tensors())
    again = {"none": 0.0, "selective": model.attention_flops, "full": layer_flops / 3.0}[workload.recompute]
    flops = samples * (3.0 * model.head_flops + model.layers * (layer_flops + again)) / one.ranks
    kernel_s = flops / (gpu.achievable_tflops * 1e12)
    return Step(ideal_s(one), one.ranks, samples, flops, kernel_s, node_bytes(one.plan(), one.fabric, one.job))
