"""Policies by name, file or class, as commands and suites spell them, on a simulated cluster."""

from __future__ import annotations

from paceenv.policies import names
from paceenv.policies.base import Policy
from paceenv.policies.clairvoyant import Clairvoyant
from paceenv.policies.foreign import FOREIGN_HELP, foreign_policy
from paceenv.sim.cluster import Cluster

NAMES = (*names.NAMES, names.AHEAD)
POLICY_HELP = (
    "passive, paper, adaptive, learned (the released policy file), "
    "clairvoyant (looks ahead on the true noise: no job can have it), a policy file, or static with the cluster's "
    "settings or others: static:threshold=0.05,window=0.2,mechanism=phase_shift, static:slack=0.02/0.3, "
    "static:my-cluster.yaml; with a weight of variation where it was trained for some: learned:preference=0.3; "
    f"or {FOREIGN_HELP}"
)


def select_policy(text: str, cluster: Cluster) -> Policy | Clairvoyant:
    """The policy that ``text`` names; ``static`` takes settings that are not given from the cluster config.

    Raises InputError for an unknown name or option, and for an invalid file.
    """
    pacing = cluster.pacing
    named = names.rule(text, (pacing.mechanism, pacing.threshold, pacing.window))
    if named is not None:
        return named
    name, preference = names.parts(text, ("clairvoyant",))
    if name == "clairvoyant":
        return Clairvoyant(preference=preference or 0.0)
    return foreign_policy(text) or names.find(text, NAMES)[1].policy
