"""Policies by name, file or class, as commands and suites spell them, on a simulated cluster.

``module:Class`` is an agent of your own: this runs its module's code, nothing else does.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceenv.core import pacing
from paceenv.core.errors import InputError, short_repr
from paceenv.policies import names
from paceenv.policies.base import INTERVAL_ITERATIONS, Policy, fault_of
from paceenv.policies.clairvoyant import Clairvoyant
from paceenv.sim.cluster import Cluster

NAMES = (*names.NAMES, names.AHEAD)
POLICY_HELP = (
    "passive, paper, adaptive, learned (the released policy file), "
    "clairvoyant (looks ahead on the true noise: no job can have it), a policy file, or static with the cluster's "
    "settings or others: static:slack=0.02/0.3,phase_shift=0.05/0.2 (threshold/window), "
    "static:my-cluster.yaml; with a weight of variation where it was trained for some: learned:preference=0.3; "
    "or an agent of your own, module:Class, which runs its code"
)
_CLASS = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


def select_policy(text: str, cluster: Cluster, known: Sequence[str] = NAMES) -> Policy | Clairvoyant:
    """The policy that ``text`` names; ``static`` takes settings that are not given from the cluster config.

    Raises InputError for an unknown name or option, with the ``known`` ones, and for an invalid file.
    """
    default = cluster.pacing
    named = names.rule(text, (default.mechanism, default.threshold, default.window))
    if named is not None:
        return named
    if text == names.AHEAD:
        return Clairvoyant()
    path, of_file, name = text.rpartition(".py:")
    if of_file and Path(f"{path}.py").is_file():
        raise InputError(f"policy {text}: a path; allowed: a module, from its folder: {Path(path).name}:{name}")
    return _own_policy(text) if names_class(text) else names.find(text, (*known, "module:Class"))[1].policy


def names_class(text: str) -> bool:
    """Whether ``text`` is of the form ``module:Class``; ``static:NAME`` is the rule."""
    return _CLASS.fullmatch(text) is not None and not text.startswith("static:")


class OwnPolicy(Policy):
    """A user's policy; what it returns is checked before the engine sees it.

    Args:
        inner: has ``act``, and whatever else of :class:`Policy` it wants to have.
    """

    def __init__(self, inner: Any, name: str) -> None:
        self._inner, self.name = inner, name
        self.interval_iterations = int(getattr(inner, "interval_iterations", INTERVAL_ITERATIONS))
        self.mechanisms = tuple(getattr(inner, "mechanisms", pacing.MECHANISMS))

    def reset(self, rows: int) -> None:
        if hasattr(self._inner, "reset"):
            self._inner.reset(rows)

    def act(self, signals_BO: NDArray[np.float32]) -> NDArray[np.float64]:
        settings = np.asarray(self._inner.act(signals_BO.copy()))
        fault = fault_of(settings, len(signals_BO), threshold=max(pacing.MAX_THRESHOLD), window=pacing.MAX_WINDOW)
        if fault:
            raise InputError(f"policy {self.name}: act {fault}")
        return settings.astype(np.float64)


def _own_policy(text: str) -> OwnPolicy:
    """Import ``module:Class``, as the working directory and the Python path have it, and make one."""
    module_name, _, name = text.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` has it; the command's own folder is where it is installed
    try:
        made = getattr(importlib.import_module(module_name), name)()
    except Exception as error:  # their code
        raise InputError(f"policy {text}: {type(error).__name__}: {error}; allowed: module:Class") from error
    if not callable(getattr(made, "act", None)):
        allowed = "a class with act(signals), such as one of paceenv.policies.base.Policy"
        raise InputError(f"policy {text}: {short_repr(made)}; allowed: {allowed}")
    return OwnPolicy(made, text)
