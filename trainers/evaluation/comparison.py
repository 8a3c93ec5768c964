"""The file of a comparison for ``paceenv evaluate``: policies and their clusters. Sweeps write such files."""

from __future__ import annotations

import os
from pathlib import Path

from pydantic import Field

from paceenv.core.errors import InputError
from paceenv.policies.foreign import names_class
from paceenv.trainers.evaluation.suites import Split, Suite, load_suite
from paceenv.ui import config_files
from paceenv.ui.config_files import Config


class Comparison(Config):
    """Policies on the clusters of a suite; where a policy is a file, its path is relative to this one's folder."""

    description: str = ""
    policies: list[str] = Field(min_length=1, description="by name or file")
    suite: str
    splits: list[Split] = Field([], description="of the suite; empty: all of it")

    def chosen(self) -> Suite:
        """The suite with the clusters that are meant."""
        suite = load_suite(self.suite)
        return suite.only(self.splits) if self.splits else suite


def is_comparison(text: str) -> bool:
    """Whether an argument that may be a policy is the file of a comparison."""
    return Path(text).suffix in {".yaml", ".yml"} and not text.startswith("static:")


def load_comparison(path: str | os.PathLike[str]) -> Comparison:
    """Read the file of a comparison; InputError for one that names code (``module:Class``)."""
    file = Path(path)
    comparison = config_files.parse(Comparison, config_files.read_yaml(file), str(file))
    for name in comparison.policies:
        if names_class(name):
            raise InputError(f"{file}: policy {name}: a class, whose code would run; allowed: names and policy files")
    policies = [str(file.parent / name) if ".safetensors" in name else name for name in comparison.policies]
    return comparison.model_copy(update={"policies": policies})
