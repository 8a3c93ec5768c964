"""Names that have changed: the old one keeps working for one version, with a warning that gives the new one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from paceenv.core.renames import RenamedWarning, mechanism_name
from paceenv.envs.pacing_env import PacingEnv
from paceenv.policies.names import rule
from paceenv.sim.cluster import Cluster, load_cluster
from paceenv.trainers.evaluation.suites import load_suite
from paceenv.ui import config_files


def rewritten(tmp_path: Path, name: str, *replacements: tuple[str, str]) -> Cluster:
    """A packaged cluster read from a file in which the new names were replaced by the old ones."""
    text = config_files.find("clusters", name).read_text()
    for new, old in replacements:
        assert new in text
        text = text.replace(new, old)
    (tmp_path / "old.yaml").write_text(text)
    return load_cluster(str(tmp_path / "old.yaml"))


@pytest.mark.parametrize(
    ("name", "new", "old"),
    [
        ("unequal-slack", "post_collective_work:", "exposed:"),
        ("local-sgd", "sync_period", "every"),
        ("two-jobs", "phase_shift", "slide"),
    ],
)
def test_an_old_config_is_read_as_the_new_one(name: str, new: str, old: str, tmp_path: Path) -> None:
    with pytest.warns(RenamedWarning, match=f"{old.strip(':')} is now called {new.strip(':')}"):
        cluster = rewritten(tmp_path, name, (new, old))
    assert cluster == load_cluster(name)


def test_set_takes_an_old_key_over_the_new_one() -> None:
    with pytest.warns(RenamedWarning, match="exposed is now called post_collective_work"):
        changed = load_cluster("unequal-slack").changed(["exposed.work_s=0.3"])
    assert changed == load_cluster("unequal-slack").changed(["post_collective_work.work_s=0.3"])
    assert changed.post_collective_work.groups == load_cluster("unequal-slack").post_collective_work.groups


@pytest.mark.parametrize("old", ["static:mechanism=slide,threshold=0.1,window=0.2", "static:slide=0.1/0.2"])
def test_an_old_policy_name_gives_the_same_settings(old: str) -> None:
    with pytest.warns(RenamedWarning, match="slide is now called phase_shift"):
        before = rule(old)
    now = rule(old.replace("slide", "phase_shift"))
    assert before is not None
    assert now is not None
    view = np.zeros((1, 12), np.float32)
    assert np.array_equal(before.act(view), now.act(view))


def test_old_names_of_a_suite_and_a_mechanism() -> None:
    with pytest.warns(RenamedWarning, match="slide is now called phase-shift"):
        assert load_suite("slide") == load_suite("phase-shift")
    with pytest.warns(RenamedWarning, match="slide is now called phase_shift"):
        PacingEnv("two-jobs", mechanisms=("slide",))
    assert mechanism_name("slack") == "slack"
