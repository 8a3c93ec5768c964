"""The protocol of the leaderboard: on which clusters, seeds and iterations every agent is scored.

Training cannot reach what scores are made on. Its episodes have seeds of their own range
(``paceenv.sim.engine.simulator.TRAINING_SEEDS``), selection has others, and the clusters of the splits ``held-out`` and
``random`` are drawn by a seed that is the hash of the digests of all policies that were final before the draw. Nobody
could know these clusters before, and nobody can choose them: one changed bit in one policy draws others.
"""

from __future__ import annotations

import hashlib
import json
from functools import cached_property
from pathlib import Path
from typing import Literal

from pydantic import Field

from paceenv.core.limits import LIMITS
from paceenv.trainers.evaluation.comparison import digest
from paceenv.trainers.evaluation.suites import REPORTED, Case, RandomCases, RelativeCases, Suite, load_suites
from paceenv.ui import config_files
from paceenv.ui.config_files import Config

ScoredSplit = Literal["held-out", "random", "validation"]
SCORED_SPLITS: tuple[ScoredSplit, ...] = ("held-out", "random", "validation")
KIND, NAME = "leaderboard", "protocol"
FIRST_SEED = 1_500_000
"""Of the episodes: far from those of suites (from 1,000,000 on) and of selection (from 2,000,000 on)."""
MAX_RANDOM_RANKS = 64
BY_HAND = tuple(name for name in REPORTED if name != "held-out")


class Protocol(Config):
    """One version of the protocol."""

    version: int = Field(ge=1)
    seeds: int = Field(16, ge=2, description="episodes on each cluster")
    iterations: int = Field(1200, ge=40)
    clusters: int = Field(40, ge=1, le=1000, description="of split held-out, and of split random")
    drawn_from: list[str] = Field(min_length=1, description="SHA-256 of the policies that were final before the draw")

    @property
    def cluster_seed(self) -> int:
        """The seed of the drawn clusters."""
        return int(hashlib.sha256("\n".join(sorted(self.drawn_from)).encode()).hexdigest()[:7], 16)

    def suite(self, split: ScoredSplit) -> Suite:
        """The clusters of a split; those of ``validation`` are the ones that training runs select on."""
        cases: list[Case]
        if split == "validation":
            cases = load_suites(BY_HAND, split).only(["validation"]).cases
        elif split == "held-out":
            cases = RelativeCases(seed=self.cluster_seed, clusters=self.clusters, suites=list(BY_HAND)).cases()
        else:
            drawn = RandomCases(seed=self.cluster_seed, clusters=self.clusters, max_ranks=MAX_RANDOM_RANKS)
            cases = drawn.cases()
        length = {"iterations": self.iterations, "seeds": self.seeds, "first_seed": FIRST_SEED, "limits": LIMITS}
        return Suite(name=split, cases=cases, **length)

    def fingerprint(self, split: ScoredSplit) -> str:
        """A digest of all that a score on a split depends on but the agent: clusters, seeds, length, limits."""
        return self._fingerprints[split]

    @cached_property
    def _fingerprints(self) -> dict[str, str]:
        found = dict[str, str]()
        for split in SCORED_SPLITS:
            suite = self.suite(split)
            parts = [(case.name, case.null_case, digest(case.load())) for case in suite.cases]
            whole = [parts, suite.seeds, suite.iterations, suite.first_seed, str(suite.limits)]
            found[split] = hashlib.sha256(json.dumps(whole).encode()).hexdigest()[:16]
        return found


def load_protocol(folder: Path | None = None) -> Protocol:
    """The protocol of a folder, or without one the one that comes with the package."""
    return config_files.load(Protocol, KIND, NAME if folder is None else folder / f"{NAME}.yaml")
