"""The pacing of a cluster config reaches a job: ``static:FILE.yaml`` means its numbers, simulated and live."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from paceenv.core import pacing
from paceenv.core.errors import InputError
from paceenv.live.decide.live_policy import find_policy
from paceenv.policies.base import Policy
from paceenv.policies.select import select_policy
from paceenv.sim.cluster import load_cluster
from paceenv.ui import config_files

RATIOS = st.floats(0.0, 1.0)
PACING = st.fixed_dictionaries(
    {},
    optional={
        "mechanism": st.sampled_from(["slack", "phase_shift", "stagger", "defer", "mean_slack"]),
        "threshold": RATIOS,
        "window": RATIOS,
    },
)


def settings_of(policy: Any) -> np.ndarray[Any, Any]:
    """The settings of a fixed policy, ``(M, 2)``."""
    assert isinstance(policy, Policy)
    constant = policy.constant()
    assert constant is not None
    return constant


def write(path: Path, section: Any) -> Path:
    """A cluster config that differs from a packaged one in its section ``pacing`` only."""
    path.write_text(
        yaml.safe_dump(config_files.read_yaml(config_files.find("clusters", "null-jitter")) | {"pacing": section})
    )
    return path


@given(section=PACING)
def test_any_section_means_the_same_simulated_and_live(section: dict[str, Any], tmp_path_factory: Any) -> None:
    file = write(tmp_path_factory.mktemp("cluster") / "mine.yaml", section)
    expected = load_cluster(file).pacing
    live = settings_of(find_policy(f"static:{file}").policy)
    place = pacing.MECHANISMS.index(expected.mechanism)
    assert live[place].tolist() == [expected.threshold, expected.window]
    assert not np.delete(live, place, axis=0).any()
    np.testing.assert_array_equal(live, settings_of(select_policy("static", load_cluster(file))))


def test_a_policy_from_a_file_carries_its_numbers_in_its_name(tmp_path: Path) -> None:
    file = write(tmp_path / "mine.yml", {"mechanism": "phase_shift", "threshold": "1e-2", "window": 0.15})
    found = find_policy(f"static:{file}")
    assert found.source == f"static:{file}"
    assert found.policy.name == "static:phase_shift=0.01/0.15"
    np.testing.assert_array_equal(settings_of(find_policy(found.policy.name).policy), settings_of(found.policy))


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("", "no such file"),
        ("pacing: {threshold: [", "not valid YAML"),
        (None, "pacing = None; allowed: a section with the keys mechanism, threshold, window"),
        ({"treshold": 0.1}, "pacing = {'treshold': 0.1}; allowed: a section with the keys"),
        (
            {"mechanism": "magic"},
            "pacing.mechanism = 'magic'; allowed: one of slack, phase_shift, stagger, mean_slack, de",
        ),
        ({"threshold": 1.5}, "slack = '1.5/0.1'; allowed: threshold/window, both numbers from 0 to 1"),
        ({"window": "wide"}, "slack = '0.0/wide'; allowed: threshold/window"),
    ],
)
def test_a_file_or_section_that_cannot_be_used_is_refused(content: Any, expected: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    if not isinstance(content, str):
        write(file, content)
    elif content:
        file.write_text(content)
    with pytest.raises(InputError) as caught:
        select_policy(f"static:{file}", load_cluster("null-jitter"))
    assert str(caught.value).startswith(f"policy static:{file}: {file}: {expected}")
    assert find_policy(f"static:{file}").fault == str(caught.value), "a live job observes for the same reason"
