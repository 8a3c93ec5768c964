"""``paceenv evaluate --explain``: its pictures show what the policy does."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.image import imread

from paceenv.cli import application
from paceenv.core import pacing, signals
from paceenv.core.errors import InputError
from paceenv.core.limits import LIMITS
from paceenv.policies.rollout import run, start
from paceenv.policies.rules import Adaptive, Static
from paceenv.policies.select import select_policy
from paceenv.sim.cluster import load_cluster
from paceenv.trainers.evaluation import explain
from paceenv.trainers.evaluation.explain import Watched, cut, positions, watch
from paceenv.ui import figures

SMALL = ["--suite", "demo", "--seeds", "2", "-i", "40"]


def watched(policy: str, cluster: str, *changes: str) -> Watched:
    config = load_cluster(cluster).changed(changes, "test")
    return watch(select_policy(policy, config), config, LIMITS, 0, 100)


def has_colour(path: Path, colour: str) -> bool:
    """Whether a picture shows a colour somewhere."""
    pixels = np.asarray(imread(path))[..., :3]
    return bool((np.abs(pixels - to_rgb(colour)) < 0.01).all(axis=-1).any())


def test_a_slice_is_what_the_policy_decides_at_each_point_after_a_few_intervals() -> None:
    view_BO = watched("passive", "unequal-slack").view_BO
    found = cut(Adaptive(), view_BO)
    on_YXM = found.settings_YXM2[..., pacing.WINDOW] > 0.0
    typical_O = np.median(view_BO, axis=0)
    wait, comm = (typical_O[signals.NAMES.index(name)] for name in ("wait_share", "comm_share"))
    wait, beyond_Y = signals.unsquash("wait_share", wait), comm * (1.0 - 1.0 / found.inflation_Y)
    barrier_Y = np.abs(wait - beyond_Y) > Adaptive.BARRIER_SHARE * np.maximum(wait, beyond_Y)
    assert barrier_Y.any()
    assert (on_YXM[:, :, pacing.SLACK] == barrier_Y[:, None]).all(), "else phase_shift comes first"
    assert (on_YXM[:, :, pacing.PHASE_SHIFT] == ~barrier_Y[:, None]).all()
    slack_B, inflation_B = positions(view_BO)
    assert slack_B.max() <= found.slack_X[-1]
    assert np.percentile(inflation_B, 99) <= found.inflation_Y[-1]
    constant = cut(Static({"slack": (0.02, 0.25)}), view_BO).settings_YXM2
    assert (constant[..., pacing.SLACK, :] == [0.02, 0.25]).all()


def test_a_watched_run_is_an_ordinary_one() -> None:
    config = load_cluster("unequal-slack")
    one = watch(Adaptive(), config, LIMITS, 3, 110)
    plain = run(Adaptive(), start(config, np.array([3])), 110)
    np.testing.assert_array_equal(one.step_T, plain.step_ET[0])
    assert one.view_BO.shape == (5 * config.ranks, signals.SIGNALS)


@pytest.mark.parametrize(
    ("cluster", "policy"), [("unequal-slack", "static"), ("incast-shallow", "static"), ("gpus-512-200g", "passive")]
)
def test_phases_fill_every_step(cluster: str, policy: str) -> None:
    one = watched(policy, cluster)
    for phase in one.phases:
        assert phase.name in figures.PHASE_COLOURS
        assert phase.length_TR.min() >= 0.0
    for before, after in itertools.pairwise(one.phases):
        assert np.allclose(before.end_TR, after.start_TR), "no gap and no overlap"
    total_TR = np.sum([p.length_TR for p in one.phases], axis=0)
    np.testing.assert_allclose(total_TR, np.broadcast_to(one.step_T[:, None], total_TR.shape), rtol=1e-12)


def test_ranks_that_run_ahead_are_in_one_phase_at_a_time() -> None:
    one = watched("passive", "stale", "noise.jitter_cv=0.3")
    begin_T1 = np.concatenate([[0.0], np.cumsum(one.step_T)[:-1]])[:, None]
    starts_TPR = np.stack([begin_T1 + p.start_TR for p in one.phases], axis=1)
    ends_TPR = np.stack([begin_T1 + p.end_TR for p in one.phases], axis=1)
    ranks = one.batch.ranks
    np.testing.assert_allclose(ends_TPR.reshape(-1, ranks)[:-1], starts_TPR.reshape(-1, ranks)[1:], atol=1e-5)
    blocked = next(p for p in one.phases if p.name == "collective").length_TR.sum()
    assert blocked > 0.01 * one.step_T.sum() * ranks, "with so much noise some are blocked"


def test_representative_ranks_reach_from_the_critical_to_the_idle() -> None:
    wait_s_R = np.random.default_rng(0).permutation(100.0 * np.arange(50))
    chosen = figures.representative(wait_s_R, 16)
    assert list(chosen) == sorted(set(chosen.tolist()))
    assert len(chosen) == 16
    assert {int(wait_s_R.argmin()), int(wait_s_R.argmax())} <= set(chosen.tolist())
    assert figures.representative(wait_s_R[:16], 16).tolist() == list(range(16))


@pytest.mark.slow
def test_evaluate_draws_each_policy_on_each_cluster(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(explain, "ITERATIONS", 100)
    suite, out = tmp_path / "one.yaml", tmp_path / "out"
    suite.write_text("name: one\ncases: [{cluster: unequal-slack}]\n")
    options = [*SMALL, "--suite", str(suite), "--explain", str(out)]
    assert application.run(["evaluate", "learned", "clairvoyant", *options]) == 0
    assert f"drew what each policy does, one seed a cluster, in {out}" in capsys.readouterr().err
    assert {file.name for file in out.iterdir()} == {
        "learned-unequal-slack-timeline.png",
        "learned-unequal-slack-settings.png",
        "clairvoyant-unequal-slack-timeline.png",
    }, "who looks ahead does not decide on what a rank sees"
    for phase in ("delay", "compute", "collective", "post-collective work", "barrier wait"):
        assert has_colour(out / "learned-unequal-slack-timeline.png", figures.PHASE_COLOURS[phase])
    assert has_colour(out / "learned-unequal-slack-settings.png", "#e8000b"), "its calibrated range"


def test_a_folder_that_cannot_be_is_one_line_before_any_work(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(InputError, match=f"{tmp_path}/file: cannot be made a folder"):
        application.run(["evaluate", "static", *SMALL, "--explain", str(tmp_path / "file")])
