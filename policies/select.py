"""Policies by name or by file, as commands and suites spell them, on a simulated cluster."""

from __future__ import annotations

import os

from paceenv.core.limits import LIMITS, Limits
from paceenv.policies import names, saved
from paceenv.policies.base import Policy
from paceenv.policies.clairvoyant import Clairvoyant
from paceenv.policies.networks import foreign
from paceenv.sim.cluster import Cluster

NAMES = (*names.NAMES, *names.NEED_SIMULATOR)
POLICY_HELP = (
    "passive, static, paper, adaptive, projection (from rollouts of this cluster), learned (the released policy file), "
    "clairvoyant (a bound: it knows the noise to come), or a policy file. static takes options: "
    "static:threshold=0.05,window=0.2,mechanism=phase_shift, or threshold/window by mechanism: "
    "static:slack=0.02/0.3,phase_shift=0.05/0.05, or the settings of a cluster config: "
    "static:my-cluster.yaml; a policy trained for a range of weights of variation takes one: "
    f"learned:preference=0.3, FILE.safetensors:preference=0.3; or {foreign.HELP}"
)


def select_policy(text: str, cluster: Cluster, limits: Limits = LIMITS) -> Policy | Clairvoyant:
    """The policy that ``text`` names; ``static`` takes settings that are not given from the cluster config.

    Raises InputError for an unknown name or option, and for an invalid file.

    Args:
        text: as a command line spells it.
        cluster: the config of the job.
        limits: of every delay, for a policy that simulates the job to find its settings.
    """
    pacing = cluster.pacing
    named = names.rule(text, (pacing.mechanism, pacing.threshold, pacing.window))
    if named is not None:
        return named
    name, preference = saved.parts(text, ("clairvoyant",))
    if name == "clairvoyant":
        return Clairvoyant(preference=preference or 0.0)
    if text == "projection":
        from paceenv.policies.projection import Projection  # only here: it needs SciPy, other policies do not

        return Projection(cluster, threads=os.cpu_count() or 1, limits=limits)
    return foreign.foreign_policy(text) or saved.find(text, NAMES)[1].policy
