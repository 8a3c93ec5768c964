"""Policies by name or by file, as commands and suites spell them, on a simulated cluster."""

from __future__ import annotations

import difflib
from pathlib import Path

from paceenv.cluster import Cluster
from paceenv.errors import InputError
from policies import names
from policies.base import Policy
from policies.clairvoyant import Clairvoyant
from policies.file import load_policy

NAMES = (*names.NAMES, "clairvoyant")
POLICY_HELP = (
    "passive, static, paper, adaptive, clairvoyant (a bound: it looks ahead), or a policy file. "
    "static takes options: static:threshold=0.05,window=0.2,mechanism=slide, or threshold/window by mechanism: "
    "static:slack=0.02/0.3,slide=0.05/0.05"
)


def select_policy(text: str, cluster: Cluster) -> Policy | Clairvoyant:
    """The policy that ``text`` names; ``static`` takes what it is not told from the cluster config."""
    pacing = cluster.pacing
    named = names.rule(text, (pacing.mechanism, pacing.threshold, pacing.window))
    if named is not None:
        return named
    if text == "clairvoyant":
        return Clairvoyant()
    if Path(text).suffix == ".safetensors" or Path(text).exists():
        return load_policy(text).policy
    close = difflib.get_close_matches(text, NAMES, 1)
    hint = f"; did you mean {close[0]}?" if close else ""
    raise InputError(f"policy {text}: no such file; allowed: {', '.join(NAMES)} or a .safetensors file{hint}")
