"""Suites: on which clusters policies are trained, selected and compared, split by cluster and not only by seed."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from paceenv.core.errors import InputError
from paceenv.sim.cluster import Cluster, load_cluster
from paceenv.sim.engine.simulator import TRAINING_SEEDS
from paceenv.trainers.evaluation.random_clusters import RandomClusters
from paceenv.ui import config_files
from paceenv.ui.config_files import Config, Mechanism

Split = Literal["train", "validation", "held-out"]
SPLITS: tuple[Split, ...] = ("train", "validation", "held-out")
MAX_FIRST_SEED = TRAINING_SEEDS // 2
"""First seeds of evaluations, with room for as many seeds as anybody wants below those of training."""


class ClusterShare(Config):
    """A cluster, changed where it should differ, and its weight among others."""

    cluster: str | Cluster = Field(description="by file or by name in configs/clusters, or the config itself")
    set: dict[str, Any] = Field({}, description="values that differ from the cluster's config: job.nodes: 16")
    weight: float = Field(1.0, gt=0)
    null_case: bool = Field(False, description="whether pacing must not matter there")

    def load(self) -> Cluster:
        """The cluster config with the changes applied."""
        cluster = self.cluster if isinstance(self.cluster, Cluster) else load_cluster(self.cluster)
        assignments = [f"{key}={json.dumps(value)}" for key, value in self.set.items()]
        return cluster.changed(assignments, f"{self.cluster_name}, set", "set") if assignments else cluster

    @property
    def cluster_name(self) -> str:
        """The cluster's name, or the file it comes from."""
        return self.cluster.name if isinstance(self.cluster, Cluster) else self.cluster

    def beside(self, path: Path) -> Self:
        """The same, read from ``path``: a cluster's file may lie beside that."""
        if isinstance(self.cluster, Cluster):
            return self
        return self.model_copy(update={"cluster": config_files.resolve_sibling(path, self.cluster)})


class Case(ClusterShare):
    """One cluster of a suite, by a name of its own."""

    name: str = Field("", description="empty: as the cluster")
    split: Split = Field("held-out", description="for training, for selection, or for the score table only")
    suite: str = Field("", description="which suite it comes from; filled in")

    @model_validator(mode="before")
    @classmethod
    def _named(cls, data: Any) -> Any:
        if not isinstance(data, dict) or data.get("name"):
            return data
        cluster = data.get("cluster", "")
        name = cluster.get("name", "") if isinstance(cluster, dict) else getattr(cluster, "name", cluster)
        return {**data, "name": name}

    def load(self) -> Cluster:
        return super().load().model_copy(update={"name": self.name})


class RandomCases(RandomClusters):
    """Random clusters as the cases of one split."""

    split: Split = "held-out"
    weight: float = Field(1.0, gt=0, description="of each cluster")

    def cases(self) -> list[Case]:
        return [
            Case(name=cluster.name, cluster=cluster, split=self.split, null_case=is_null, weight=self.weight)
            for cluster, is_null in self.draw()
        ]


class Suite(Config):
    """Clusters on which policies are compared."""

    name: str
    description: str = ""
    cases: list[Case] = []
    random: list[RandomCases] = Field([], description="further cases, which a seed draws")
    mechanisms: list[Mechanism] = Field(
        ["slack", "phase_shift", "stagger"],
        min_length=1,
        description="mechanisms that the search for the best static policy tries",
    )
    iterations: int = Field(1600, ge=40)
    seeds: int = Field(24, ge=2)
    first_seed: int = Field(1_000_000, ge=0, le=MAX_FIRST_SEED)

    @model_validator(mode="after")
    def _names_differ(self) -> Suite:
        if not self.cases and not self.random:
            raise ValueError("cases, or random ones")
        names = [case.name for case in self.cases]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"cases with different names (twice: {', '.join(twice)})")
        return self

    def only(self, splits: Iterable[Split]) -> Suite:
        """This suite with the cases of some splits; InputError where there are none."""
        wanted = set(splits)
        cases = [case for case in self.cases if case.split in wanted]
        if not cases:
            known = ", ".join(dict.fromkeys(case.split for case in self.cases))
            raise InputError(f"suite {self.name}: no case in split {', '.join(sorted(wanted))}; allowed: {known}")
        return self.model_copy(update={"cases": cases})


def load_suite(name: str | os.PathLike[str]) -> Suite:
    """A suite by file or by name in ``configs/suites``; ``all`` is all of :data:`REPORTED`.

    Every case knows the suite it comes from, and random cases are drawn. Files of clusters may lie beside the suite's.
    """
    if str(name) == ALL:
        return load_suites(REPORTED, ALL)
    path = config_files.find("suites", name)
    suite = config_files.load(Suite, "suites", path)
    cases = [*suite.cases, *(case for drawn in suite.random for case in drawn.cases())]
    return suite.model_copy(
        update={"cases": [c.beside(path).model_copy(update={"suite": suite.name}) for c in cases], "random": []}
    )


ALL = "all"
REPORTED = ("slack", "phase-shift", "stagger", "mixed", "scaling", "nulls")
"""The suites of the score table, in its order; together they are the suite ``all``."""


def load_suites(names: Iterable[str], name: str) -> Suite:
    """Several suites as one, which takes iterations and seeds from the first."""
    suites = [load_suite(one) for one in names]
    return suites[0].model_copy(
        update={
            "name": name,
            "description": "The suites " + ", ".join(s.name for s in suites) + ".",
            "cases": [case for suite in suites for case in suite.cases],
        }
    )
