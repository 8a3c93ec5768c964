"""``paceenv explain``: its pictures, its trace and its numbers say what the policy does."""

from __future__ import annotations

import gzip
import itertools
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.image import imread

from paceenv.cli import application
from paceenv.core import pacing, signals
from paceenv.core.errors import InputError
from paceenv.policies.base import Policy
from paceenv.policies.explain.explain_command import TIMELINE_ITERATIONS, TIMELINE_RANKS
from paceenv.policies.explain.slices import HOLD_INTERVALS, Box, cut, positions, views
from paceenv.policies.explain.watched_rollout import Watched, watch
from paceenv.policies.learned import Learned
from paceenv.policies.policy_file import PolicyFile, load_policy, save_policy
from paceenv.policies.rollout import run, start
from paceenv.policies.rules import Adaptive, passive
from paceenv.policies.select import select_policy
from paceenv.sim.cluster import load_cluster
from paceenv.sim.engine import phases
from paceenv.ui import figures

FILES = {"slices.png", "timeline.png", "timeline.trace.json.gz"}


@pytest.fixture
def policy_file(tmp_path: Path) -> Path:
    """A small random network over slack and phase_shift, calibrated for part of the two signals of a slice."""
    rng = np.random.default_rng(1)
    layers = [
        (rng.normal(size=(8, signals.SIGNALS)).astype(np.float32), np.zeros(8, np.float32)),
        (0.3 * rng.normal(size=(4, 8)).astype(np.float32), np.array([0, 0.2, 0, 0], np.float32)),
    ]
    ranges = {name: (-1.0, 1.0) for name in signals.NAMES} | {"slack_share": (0.0, 0.5), "comm_inflation": (0.0, 0.5)}
    path = tmp_path / "small.safetensors"
    save_policy(path, PolicyFile(Learned(layers, ("slack", "phase_shift")), ranges, {}))
    return path


def explain(capsys: pytest.CaptureFixture[str], out: Path, *arguments: str) -> dict[str, Any]:
    assert application.run(["explain", *arguments, "-o", str(out), "--json", "-"]) == 0
    return dict(json.loads(capsys.readouterr().out))


def has_colour(path: Path, colour: str) -> bool:
    """Whether a picture shows a colour somewhere."""
    pixels = np.asarray(imread(path))[..., :3]
    return bool((np.abs(pixels - to_rgb(colour)) < 0.01).all(axis=-1).any())


# Slices


def test_the_grid_is_what_the_policy_decides(
    policy_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = explain(capsys, tmp_path / "out", str(policy_file), "-i", "100")["slices"]
    policy = load_policy(policy_file).policy
    typical = [
        signals.squash(found["typical"][n], s) if s else found["typical"][n]
        for n, s in zip(signals.NAMES, signals.SCALES, strict=True)
    ]
    for y, x in ((0, 0), (3, 9), (8, 2), (1, 20)):
        view = np.array(typical, np.float32)
        view[signals.NAMES.index("slack_share")] = signals.squash(found["slack_share"][x], 0.05)
        view[signals.NAMES.index("comm_inflation")] = signals.squash(float(np.log(found["comm_inflation"][y])), 0.2)
        policy.reset(1)
        decided_M2 = [policy.act(view[None])[0].copy() for _ in range(HOLD_INTERVALS)][-1]
        for name, shown in found["mechanisms"].items():
            threshold, window = decided_M2[pacing.MECHANISMS.index(name)]
            assert shown["threshold"][y][x] == pytest.approx(threshold, abs=1e-5)
            assert shown["window"][y][x] == pytest.approx(window, abs=1e-5)
    windows = np.array(found["mechanisms"]["slack"]["window"])
    assert windows.min() < windows.max(), "a network that decides alike everywhere would prove nothing"
    assert found["calibrated"]["slack_share"] == pytest.approx([0.0, 0.05])
    assert found["calibrated"]["comm_inflation"] == pytest.approx([1.0, np.exp(0.2)])
    assert 0.0 < found["views_outside_share"] < 1.0, "unequal slack is more than 5 % for some ranks and none for others"


def test_a_policy_with_memory_is_shown_after_a_few_intervals() -> None:
    view_BO = watch(passive(), load_cluster("unequal-slack"), 0, 100).views_BO
    found = cut(Adaptive(), view_BO)
    assert found.remembers
    assert "stagger" in found.ever_on()
    slack_on_YX = found.settings_YXM2[:, :, pacing.SLACK, pacing.WINDOW] > 0.0
    phase_shift_on_YX = found.settings_YXM2[:, :, pacing.PHASE_SHIFT, pacing.WINDOW] > 0.0
    wait, comm = (found.typical_O[signals.NAMES.index(name)] for name in ("wait_share", "comm_share"))
    wait, beyond_Y = signals.unsquash("wait_share", wait), comm * (1.0 - 1.0 / found.inflation_Y)
    barrier_Y = np.abs(wait - beyond_Y) > Adaptive.BARRIER_SHARE * np.maximum(wait, beyond_Y)
    assert barrier_Y.any()
    assert np.array_equal(slack_on_YX, np.broadcast_to(barrier_Y[:, None], slack_on_YX.shape)), (
        "else phase_shift comes first"
    )
    assert np.array_equal(phase_shift_on_YX, ~slack_on_YX)
    alone = Adaptive()
    alone.reset(1)
    view = views(found.typical_O, found.slack_X[-1:], found.inflation_Y[:1])
    last = [alone.act(view) for _ in range(HOLD_INTERVALS)][-1]
    assert np.array_equal(last[0], found.settings_YXM2[0, -1]), "points do not see each other"


def test_a_slice_is_where_its_axes_say() -> None:
    view_BO = watch(passive(), load_cluster("two-jobs"), 0, 60).views_BO
    chosen = select_policy("static:mechanism=phase_shift,threshold=0.1,window=0.2", load_cluster("two-jobs"))
    assert isinstance(chosen, Policy)
    found = cut(chosen, view_BO)
    assert found.is_flat
    assert not found.remembers
    slack_B, inflation_B = positions(views(found.typical_O, found.slack_X, found.inflation_Y))
    assert slack_B.reshape(found.settings_YXM2.shape[:2]) == pytest.approx(
        np.broadcast_to(found.slack_X, found.settings_YXM2.shape[:2]), abs=1e-5
    )
    assert inflation_B[:: len(found.slack_X)] == pytest.approx(found.inflation_Y, rel=1e-5)
    at_B = positions(view_BO)
    assert at_B[0].max() <= found.slack_X[-1]
    assert np.percentile(at_B[1], 99) <= found.inflation_Y[-1]
    box = Box.of({"slack_share": (0.0, 0.5), "comm_inflation": (0.0, 0.5)})
    assert box is not None
    assert box.outside(np.array([0.0, 0.06, 0.04]), np.array([1.1, 1.1, 1.3])).tolist() == [False, True, True]
    assert Box.of({"slack_share": (0.0, 0.5)}) is None


# Rollouts


@pytest.mark.parametrize(
    ("cluster", "policy"),
    [("unequal-slack", "static"), ("two-jobs", "adaptive"), ("incast-shallow", "static"), ("gpus-512-200g", "passive")],
)
def test_phases_fill_every_step(cluster: str, policy: str) -> None:
    config = load_cluster(cluster)
    one = watch(select_policy(policy, config), config, 0, 100)
    for phase in one.phases:
        assert phase.name in figures.PHASE_COLOURS
        assert phase.length_TR.min() >= 0.0
    for before, after in itertools.pairwise(one.phases):
        assert np.allclose(before.end_TR, after.start_TR), "no gap and no overlap"
    total_TR = np.sum([p.length_TR for p in one.phases], axis=0)
    np.testing.assert_allclose(total_TR, np.broadcast_to(one.step_T[:, None], total_TR.shape), rtol=1e-12)
    assert sum(phases.shares(one.phases).values()) == pytest.approx(1.0)


def test_ranks_that_run_ahead_are_in_one_phase_at_a_time() -> None:
    one = watch(passive(), load_cluster("stale").changed(["noise.jitter_cv=0.3"], "test"), 0, 100)
    begin_T1 = np.concatenate([[0.0], np.cumsum(one.step_T)[:-1]])[:, None]
    starts_TPR = np.stack([begin_T1 + p.start_TR for p in one.phases], axis=1)
    ends_TPR = np.stack([begin_T1 + p.end_TR for p in one.phases], axis=1)
    ranks = one.batch.ranks
    np.testing.assert_allclose(ends_TPR.reshape(-1, ranks)[:-1], starts_TPR.reshape(-1, ranks)[1:], atol=1e-5)
    assert phases.shares(one.phases)["collective"] > 0.01, "with so much noise some are blocked"


def test_a_watched_run_is_an_ordinary_one() -> None:
    config = load_cluster("unequal-slack")
    watched = watch(Adaptive(), config, 3, 110)
    decided: list[np.ndarray[Any, Any]] = []
    plain = run(Adaptive(), start(config, np.array([3])), 110, on_settings=lambda s: decided.append(s.copy()))
    assert np.array_equal(watched.step_T, plain.step_ET[0])
    assert np.array_equal(watched.settings_IRM2, np.concatenate(decided))
    again = Adaptive()
    again.reset(config.job.ranks)
    for view_RO, settings_RM2 in zip(watched.views_IRO, watched.settings_IRM2, strict=True):
        assert np.array_equal(again.act(view_RO), settings_RM2), "views and decisions belong together"


def test_representative_ranks_reach_from_the_critical_to_the_idle() -> None:
    wait_s_R = np.random.default_rng(0).permutation(100.0 * np.arange(50))
    chosen = figures.representative(wait_s_R, 16)
    assert len(set(chosen.tolist())) == 16
    assert list(chosen) == sorted(chosen)
    assert {int(wait_s_R.argmin()), int(wait_s_R.argmax())} <= set(chosen.tolist())
    assert figures.representative(wait_s_R[:16], 16).tolist() == list(range(16))


# The command


def check_trace(path: Path, watched: list[Watched], first: int, last: int) -> None:
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert list(names.values()) == [one.policy for one in watched]
    for (pid, _), one in zip(names.items(), watched, strict=True):
        step_T = one.step_T[first : last + 1]
        for rank in range(one.batch.ranks):
            mine = sorted(
                (round(1000 * e["ts"]), round(1000 * e["dur"]), e["args"]["iteration"])
                for e in events
                if e["ph"] == "X" and (e["pid"], e["tid"]) == (pid, rank)
            )
            assert all(a + length <= b for (a, length, _), (b, _, _) in itertools.pairwise(mine))
            sums = np.zeros(len(step_T))
            np.add.at(sums, [i - first for *_, i in mine], [1e-9 * length for _, length, _ in mine])
            np.testing.assert_allclose(sums, step_T, atol=1e-8)
        counters = [e["args"]["step"] for e in events if (e["pid"], e["name"]) == (pid, "step time, ms")]
        np.testing.assert_allclose(counters, 1e3 * step_T, rtol=1e-5)


def test_explain_shows_a_static_policy_at_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, out = load_cluster("unequal-slack"), tmp_path / "out"
    assert (
        application.run(["explain", "static", "-i", "120", "--json", str(tmp_path / "numbers.json"), "-o", str(out)])
        == 0
    )
    said = capsys.readouterr()
    assert "throughput against passive" in said.out
    assert said.err.count("\n") == 1, "that it is flat is one line"
    assert "decides the same everywhere in the slice: slack with threshold 0.02, window 0.25" in said.err
    assert {file.name for file in out.iterdir()} == FILES
    found = json.loads((tmp_path / "numbers.json").read_text())
    paced, unpaced = (watch(select_policy(name, config), config, 0, 120) for name in ("static", "passive"))
    check_trace(out / "timeline.trace.json.gz", [paced, unpaced], *found["timeline"]["trace_iterations"])
    assert found["step_mean_s"] == pytest.approx({"paced": paced.step_T.mean(), "passive": unpaced.step_T.mean()})
    assert found["throughput_gain"] == pytest.approx(unpaced.step_T.mean() / paced.step_T.mean() - 1.0)
    assert found["throughput_gain"] > 0.1
    assert found["on_share"] == dict.fromkeys(pacing.MECHANISMS, 0.0) | {"slack": 1.0}
    for name, one in (("paced", paced), ("passive", unpaced)):
        assert sum(found["phase_share"][name].values()) == pytest.approx(1.0)
        assert found["phase_share"][name]["delay"] == pytest.approx(one.delay_TR.mean() / one.step_T.mean())
    assert found["slices"]["flat"]
    assert np.array_equal(found["slices"]["mechanisms"]["slack"]["window"], np.full((33, 33), 0.25))
    assert found["timeline"]["ranks"] == list(range(8))
    shown = slice(found["timeline"]["first_iteration"], None)
    assert paced.delay_TR[shown][:TIMELINE_ITERATIONS].any(), "a timeline shows the policy at work"
    for phase in ("delay", "compute", "collective", "post-collective work", "barrier wait"):
        assert has_colour(out / "timeline.png", figures.PHASE_COLOURS[phase])


def test_explain_draws_what_is_off_as_off(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = explain(capsys, tmp_path, "passive", "--cluster", "null-jitter", "-i", "60", "--nodes", "32", "--at", "10")
    assert (found["throughput_gain"], found["mean_delay_s"]) == (0.0, 0.0)
    assert found["slices"]["mechanisms"].keys() == {load_cluster("null-jitter").pacing.mechanism}
    assert found["timeline"]["first_iteration"] == 10
    assert len(found["timeline"]["ranks"]) == TIMELINE_RANKS
    pixels = np.asarray(imread(tmp_path / "slices.png"))[..., :3]
    off = (np.abs(pixels - to_rgb("#d9d9d9")) < 0.01).all(axis=-1).mean()
    assert off > 0.4, "off is grey, and it is off everywhere"
    assert not has_colour(tmp_path / "timeline.png", figures.PHASE_COLOURS["delay"])


def test_explain_of_a_policy_file_draws_its_range(
    policy_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = explain(capsys, tmp_path / "out", str(policy_file), "-i", "200")
    assert has_colour(tmp_path / "out" / "slices.png", "#e8000b")
    slices = found["slices"]
    slack_X, inflation_Y = np.array(slices["slack_share"]), np.array(slices["comm_inflation"])
    outside_YX = (slack_X > 0.062) | (inflation_Y > 1.3)[:, None]  # with the tolerance that the policy allows
    inside_YX = (slack_X <= 0.05) & (inflation_Y <= 1.2)[:, None]
    window_MYX = np.array([one["window"] for one in slices["mechanisms"].values()])
    assert (window_MYX[:, outside_YX] == 0.0).all(), "a policy that knows its range is off beyond it"
    assert (window_MYX[:, inside_YX] > 0.0).any()
    assert found["outside_calibrated_range"]["signal"] == "slack_share"


def test_the_clairvoyant_bound_has_a_timeline_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = explain(capsys, tmp_path, "clairvoyant", "-i", "60")
    assert found["slices"] is None
    assert {file.name for file in tmp_path.iterdir()} == FILES - {"slices.png"}
    assert found["on_share"]["slack"] > 0.0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["pasive"], "did you mean passive"),
        (["no/such.safetensors"], "no such policy file"),
        (["static:size=1"], "unknown option size"),
        (["static", "--cluster", "unequal-slac"], "did you mean unequal-slack"),
        (["static", "--set", "noise.jiter_cv=0.1"], "did you mean jitter_cv"),
        (["static", "-i", "39"], "--iterations = 39; allowed: 40 to 500000 with 8 ranks and a decision every"),
        (["static", "-i", "500001"], "--iterations = 500001"),
        (["static", "-i", "100", "--at", "95"], "--at = 95; allowed: 0 to 94"),
        (["static", "--nodes", "0"], "--help"),
        ([], "Missing argument"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(arguments: list[str], said: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(InputError) as caught:
        application.run(["explain", *arguments, "-o", str(out)])
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not out.exists()


def test_an_output_folder_that_cannot_be_is_exit_code_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    monkeypatch.setattr(sys, "argv", ["paceenv", "explain", "static", "-o", str(blocked)])
    with pytest.raises(SystemExit) as caught:
        application.main()
    assert caught.value.code == 2
    said = capsys.readouterr()
    assert said.err == f"paceenv: error: {blocked}: cannot be made a folder: File exists\n"
    assert said.out == ""
