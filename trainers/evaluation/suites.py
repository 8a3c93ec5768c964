"""Suites: on which clusters policies are trained, selected and compared, split by cluster and not only by seed."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import Field, model_validator

from paceenv.calibration.posterior import drawn_clusters, parameters_of
from paceenv.core.errors import InputError
from paceenv.core.files import YAML_SUFFIXES
from paceenv.core.limits import LIMITS, Limits
from paceenv.sim.cluster import Cluster, load_cluster
from paceenv.sim.engine.simulator import TRAINING_SEEDS
from paceenv.trainers.evaluation.random_clusters import MAX_RANKS, random_cluster, relative
from paceenv.ui import config_files
from paceenv.ui.config_files import Config, Mechanism

Split = Literal["train", "validation", "held-out"]
RELATIVE_NULLS = 0.3
"""Share of nulls among relatives."""
MAX_FIRST_SEED = TRAINING_SEEDS // 2
"""First seeds of evaluations, with room for as many seeds as anybody wants below those of training."""


class Case(Config):
    """A cluster, changed where it should differ, by a name of its own, and its weight among others."""

    cluster: str | Cluster = Field(description="by file or by name in configs/clusters, or the config itself")
    set: dict[str, Any] = Field({}, description="values that differ from the cluster's config: job.nodes: 16")
    weight: float = Field(1.0, gt=0, description="how often the cluster is drawn, relative to the others")
    null_case: bool = Field(False, description="whether pacing must not matter there")
    name: str = Field("", description="empty: as the cluster")
    split: Split = Field("held-out", description="for training, for selection, or for scores only")
    suite: str = Field("", description="which suite it comes from; filled in")

    @model_validator(mode="before")
    @classmethod
    def _named(cls, data: Any) -> Any:
        if not isinstance(data, dict) or data.get("name"):
            return data
        cluster = data.get("cluster", "")
        if isinstance(cluster, str):
            return {**data, "name": Path(cluster).name}
        return {**data, "name": cluster.get("name", "") if isinstance(cluster, dict) else getattr(cluster, "name", "")}

    def load(self) -> Cluster:
        """The cluster config with the changes applied."""
        cluster = self.cluster if isinstance(self.cluster, Cluster) else load_cluster(self.cluster)
        assignments = [f"{key}={json.dumps(value)}" for key, value in self.set.items()]
        cluster = cluster.changed(assignments, f"{self.name}, set", "set") if assignments else cluster
        return cluster.model_copy(update={"name": self.name})


class DrawnCases(Config):
    """Clusters that a seed draws, as the cases of one split."""

    split: Split = Field("held-out", description="the split of its clusters")
    weight: float = Field(1.0, gt=0, description="weight of each cluster")

    def _case(self, cluster: Cluster, is_null: bool) -> Case:
        return Case(name=cluster.name, cluster=cluster, split=self.split, null_case=is_null, weight=self.weight)


class RandomCases(DrawnCases):
    """So many random clusters (``random_clusters.py``); more of them begin with the same ones."""

    seed: int = Field(ge=0, description="clusters of two seeds have nothing in common")
    clusters: int = Field(48, ge=1, le=10_000, description="number of clusters")
    max_ranks: int = Field(MAX_RANKS, ge=8, le=MAX_RANKS, description="ranks of the largest job")

    def cases(self) -> list[Case]:
        return [self._case(*random_cluster(self.seed, n, self.max_ranks)) for n in range(self.clusters)]


class RelativeCases(DrawnCases):
    """Relatives of clusters of other suites (``random_clusters.py``)."""

    seed: int = Field(ge=0, description="relatives of two seeds have nothing in common")
    clusters: int = Field(ge=1, le=1000, description="number of clusters")
    suites: list[str] = Field(min_length=1, description="suites whose clusters have relatives here, of any split")

    def cases(self) -> list[Case]:
        suites = [load_suite(name) for name in self.suites]
        by_suite = [of_suite for suite in suites if (of_suite := suite.of_kind(False))]
        nulls = [case for suite in suites for case in suite.of_kind(True)]
        if not by_suite and not nulls:
            raise InputError(f"relatives of {', '.join(self.suites)}: no cluster; allowed: suites with clusters")
        generator, drawn = np.random.default_rng([self.seed, self.clusters]), list[Case]()
        for n in range(self.clusters):
            is_null = nulls and (generator.random() < RELATIVE_NULLS or not by_suite)
            cases = nulls if is_null else by_suite[generator.integers(len(by_suite))]
            case = cases[generator.integers(len(cases))]
            cluster = relative(case.load(), self.seed, n, f"{case.name}-r{n}", resize=not case.null_case)
            drawn.append(self._case(cluster, case.null_case))
        return drawn


class PosteriorCases(DrawnCases):
    """Clusters that a calibrated one may be, drawn from the errors on its record."""

    cluster: str | Cluster = Field(description="a calibrated cluster, by file or by name")
    draws: int = Field(12, ge=1, le=256, description="number of clusters")
    seed: int = Field(0, ge=0, description="seed of the draws")
    split: Split = Field("train", description="the split of its clusters")
    null_case: bool = Field(False, description="whether pacing must not matter there")

    def cases(self) -> list[Case]:
        """The drawn clusters; InputError for a cluster without a record."""
        fitted = self.cluster if isinstance(self.cluster, Cluster) else load_cluster(self.cluster)
        if not any(parameter.se for parameter in parameters_of(fitted)):
            raise InputError(
                f"{fitted.name}: no errors of a calibration on record; allowed in posterior: a cluster with "
                "calibration.fitted, as paceenv calibrate writes it"
            )
        cases = []
        for d, cluster in enumerate(drawn_clusters(fitted, seed=self.seed, draws=self.draws)):
            own = {"name": f"{fitted.name}-{self.seed}-{d}", "calibration": {}}
            cases.append(self._case(cluster.model_copy(update=own), self.null_case))
        return cases


def beside(data: Any, path: Path) -> Any:
    """Data of a config from ``path``, in which names of YAML files that lie beside it became their paths."""
    if isinstance(data, dict):
        as_is = ("name", "description", "relatives")
        return {key: value if key in as_is else beside(value, path) for key, value in data.items()}
    if isinstance(data, list):
        return [beside(value, path) for value in data]
    if isinstance(data, str) and Path(data).suffix in YAML_SUFFIXES and (path.parent / data).is_file():
        return str(path.parent / data)
    return data


class Suite(Config):
    """Clusters on which policies are compared."""

    name: str
    description: str = ""
    cases: list[Case] = Field([], description="the clusters")
    random: list[RandomCases] = Field([], description="further cases, which a seed draws")
    relatives: list[RelativeCases] = Field([], description="further cases: relatives of other suites' clusters")
    posterior: list[PosteriorCases] = Field([], description="further cases, drawn from the errors of calibrations")
    mechanisms: list[Mechanism] = Field(
        ["slack", "phase_shift", "stagger", "mean_slack"],
        min_length=1,
        description="mechanisms that the search for the best static policy tries",
    )
    iterations: int = Field(1600, ge=40, description="length of each episode, iterations")
    limits: Limits = Field(LIMITS, description="limits of every delay; by default those of a live job")
    seeds: int = Field(24, ge=2, description="episodes on each cluster")
    first_seed: int = Field(1_000_000, ge=0, le=MAX_FIRST_SEED, description="the others follow it")

    @model_validator(mode="after")
    def _has_some(self) -> Suite:
        if not (self.cases or self.random or self.relatives or self.posterior):
            raise ValueError("cases, random ones, relatives or draws of a posterior")
        return self

    def of_kind(self, null_case: bool) -> list[Case]:
        """Its nulls, or its other cases."""
        return [case for case in self.cases if case.null_case == null_case]

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

    Every case knows the suite it comes from, and what a seed draws is drawn. Files of clusters may lie beside the
    suite's.
    """
    if str(name) == ALL:
        return load_suites(REPORTED, ALL)
    path = config_files.find("suites", name)
    suite = config_files.parse(Suite, beside(config_files.read_yaml(path), path), str(path))
    drawn: list[RandomCases | RelativeCases | PosteriorCases] = [*suite.random, *suite.relatives, *suite.posterior]
    cases = [*suite.cases, *(case for source in drawn for case in source.cases())]
    cases = [case.model_copy(update={"suite": suite.name}) for case in cases]
    update = {"cases": _told_apart(cases), "random": [], "relatives": [], "posterior": []}
    return suite.model_copy(update=update)


def _told_apart(cases: Sequence[Case]) -> list[Case]:
    """The cases, with a number after every name that was there before: results are kept by name."""
    names, renamed = set[str](), list[Case]()
    for case in cases:
        name, n = case.name, 1
        while name in names:
            name, n = f"{case.name}-{n + 1}", n + 1
        names.add(name)
        renamed.append(case if name == case.name else case.model_copy(update={"name": name}))
    return renamed


ALL = "all"
REPORTED = ("slack", "phase-shift", "stagger", "mixed", "scaling", "nulls", "held-out")
"""The suites of the score table, in its order; together they are the suite ``all``."""


def load_suites(names: Iterable[str], name: str) -> Suite:
    """Several suites as one, which takes iterations and seeds from the first.

    Args:
        names: files, or names in ``configs/suites``.
    """
    suites = [load_suite(one) for one in names]
    return suites[0].model_copy(
        update={
            "name": name,
            "description": "The suites " + ", ".join(s.name for s in suites) + ".",
            "cases": _told_apart([case for suite in suites for case in suite.cases]),
        }
    )
