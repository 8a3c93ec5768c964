"""The file of a comparison for ``paceenv evaluate``: policies and their clusters. Sweeps write such files."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from pydantic import Field

from paceenv.core.errors import InputError
from paceenv.policies.foreign import names_class
from paceenv.sim.cluster import Cluster
from paceenv.trainers.evaluation.suites import Split, Suite, load_suite
from paceenv.ui import config_files
from paceenv.ui.config_files import Config


class Comparison(Config):
    """Policies on the clusters of a suite; where a policy is a file, its path is relative to this one's folder."""

    description: str = ""
    policies: list[str] = Field([], description="by name or file")
    tuned: dict[str, str] = Field({}, description="by cluster, the policy that static-tuned is there")
    clusters: dict[str, str] = Field({}, description="by cluster, the digest of the one that was searched")
    suite: str
    splits: list[Split] = Field([], description="of the suite; empty: all of it")

    def chosen(self) -> Suite:
        """The suite with the clusters that are meant."""
        suite = load_suite(self.suite)
        return suite.only(self.splits) if self.splits else suite

    def tuned_for(self, suite: Suite) -> dict[str, str]:
        """The tuned policy of every cluster of ``suite``; empty where the file has no tuned policies.

        Raises InputError where a cluster has no policy, or has changed since it was searched.
        """
        self.check(suite)
        missing = [case.name for case in suite.cases if case.name not in self.tuned]
        if self.tuned and missing:
            raise InputError(
                f"tuned: nothing for {missing[0]}; allowed: a policy for every cluster, or no tuned policies"
            )
        return {case.name: self.tuned[case.name] for case in suite.cases} if self.tuned else {}

    def check(self, suite: Suite) -> None:
        """Raise InputError where a cluster of ``suite`` has changed since it was searched."""
        for case in suite.cases:
            if self.clusters.get(case.name, now := digest(case.load())) != now:
                raise InputError(
                    f"{case.name}: changed since it was searched; allowed: the cluster as it was, or a new sweep"
                )


def digest(cluster: Cluster) -> str:
    """A digest of a resolved cluster, as far as it is simulated.

    Without defaults, as new versions bring new ones.
    """
    simulated = cluster.model_dump_json(exclude_defaults=True, exclude={"description", "calibration"})
    return hashlib.sha256(simulated.encode()).hexdigest()[:16]


def is_comparison(text: str) -> bool:
    """Whether an argument that may be a policy is the file of a comparison."""
    return Path(text).suffix in {".yaml", ".yml"} and not text.startswith("static:")


def load_comparison(path: str | os.PathLike[str]) -> Comparison:
    """Read the file of a comparison; InputError for one that names code (``module:Class``)."""
    file = Path(path)
    found = config_files.parse(Comparison, config_files.read_yaml(file), str(file))
    for name in (*found.policies, *found.tuned.values()):
        if names_class(name):
            raise InputError(f"{file}: policy {name}: a class, whose code would run; allowed: names and policy files")
    policies = [_beside(file.parent, name) for name in found.policies]
    tuned = {cluster: _beside(file.parent, name) for cluster, name in found.tuned.items()}
    return found.model_copy(update={"policies": policies, "tuned": tuned})


def _beside(folder: Path, policy: str) -> str:
    """A policy as a command line spells it from here; its file may lie beside the comparison's."""
    return str(folder / policy) if ".safetensors" in policy else policy
