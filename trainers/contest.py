"""What ``paceenv evaluate`` compares, as a file: policies and the clusters they are compared on. Sweeps write them."""

from __future__ import annotations

import os
from pathlib import Path

from pydantic import Field

from paceenv import configs
from paceenv.configs import Config
from paceenv.errors import InputError
from trainers.suites import Split, Suite, load_suite


class Contest(Config):
    """Policies on the clusters of a suite; where a policy is a file, its path is relative to this one's folder."""

    description: str = ""
    policies: list[str] = Field([], description="by name or file")
    tuned: dict[str, str] = Field({}, description="by cluster, the policy that static-tuned is there")
    suite: str
    splits: list[Split] = Field([], description="of the suite; none: all of it")

    def chosen(self) -> Suite:
        """The suite with the clusters that are meant."""
        suite = load_suite(self.suite)
        return suite.only(self.splits) if self.splits else suite

    def tuned_for(self, suite: Suite) -> dict[str, str]:
        """The tuned policy of every cluster of ``suite``; InputError where one has none, nothing if all have none."""
        missing = [case.name for case in suite.cases if case.name not in self.tuned]
        if self.tuned and missing:
            raise InputError(f"tuned: nothing for {missing[0]}; allowed: a policy for every cluster, or for none")
        return {case.name: self.tuned[case.name] for case in suite.cases} if self.tuned else {}


def is_contest(text: str) -> bool:
    """Whether an argument that may be a policy is the file of a contest."""
    return Path(text).suffix in {".yaml", ".yml"}


def load_contest(path: str | os.PathLike[str]) -> Contest:
    """A contest by file."""
    found = configs.parse(Contest, configs.read_yaml(path), str(path))
    folder = Path(path).parent
    here = [str(folder / name) if ".safetensors" in name else name for name in found.policies]
    return found.model_copy(update={"policies": here})
