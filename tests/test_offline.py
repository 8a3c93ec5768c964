"""Offline data sets: what an action, a view and a reward are in each source; Minari; what can be learned from them."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from typer.testing import CliRunner

from paceenv.calibration.structure import read_job
from paceenv.core import pacing, signals
from paceenv.core.errors import InputError
from paceenv.core.trace import Trace, read_trace
from paceenv.envs.pacing_env import PacingEnv
from paceenv.policies.policy_file import load_policy
from paceenv.policies.rollout import run, start
from paceenv.policies.rules import Static
from paceenv.sim.cluster import load_cluster
from paceenv.sim.engine.recording import RecordingWriter
from paceenv.trainers.offline.dataset_command import application
from paceenv.trainers.offline.minari_dataset import Transitions, read_dataset, write_dataset
from paceenv.trainers.offline.simulated_episodes import simulated_episodes
from paceenv.trainers.offline.td3_bc import OfflineConfig, learn_offline
from paceenv.trainers.offline.trace_episodes import rank_views, trace_episodes

CLUSTER = load_cluster("two-jobs")
SETTINGS = "static:phase_shift=0.05/0.15"
INTERVALS = 8

# Actions


@given(st.lists(st.floats(-1.0, 1.0, width=32), min_size=4, max_size=4))
def test_encoding_undoes_decoding(action: list[float]) -> None:
    names = ("phase_shift", "stagger")
    settings = pacing.decode_action(np.array([action], np.float32), names)
    again = pacing.decode_action(pacing.encode_action(settings, names), names)
    on = settings[..., pacing.WINDOW] > 1e-9  # a window that rounds to nothing is off
    np.testing.assert_allclose(again[on], settings[on], rtol=1e-5, atol=1e-9)
    assert (pacing.encode_action(pacing.off(1), names) == -1.0).all()


@pytest.mark.parametrize(
    ("mechanism", "threshold", "window", "said"),
    [
        ("slack", 0.1, 0.1, "settings of slack; allowed: of phase_shift"),
        ("phase_shift", 0.1, 0.9, "up to 0.9; allowed"),
    ],
)
def test_settings_that_no_action_stands_for_are_refused(
    mechanism: str, threshold: float, window: float, said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        pacing.encode_action(pacing.one_mechanism(mechanism, threshold, window)[None], ["phase_shift"])


# Simulated


def test_a_simulated_episode_is_the_environment_s() -> None:
    [episode] = simulated_episodes(
        CLUSTER, [SETTINGS], mechanisms=("phase_shift",), episodes=1, intervals=INTERVALS, cv_weight=0.5, seed=5
    )
    env = PacingEnv(CLUSTER, mechanisms="phase_shift", cv_weight=0.5)
    view, _ = env.reset(seed=5)
    for k in range(INTERVALS):
        np.testing.assert_array_equal(episode.view_KO[k], view)
        view, reward, *_ = env.step(episode.action_KA[k])
        assert episode.reward_K[k] == reward
    assert episode.paced


def test_behaviours_share_their_seeds_and_random_ones_cover_the_actions() -> None:
    options: dict[str, Any] = {"mechanisms": ("phase_shift",), "episodes": 16, "intervals": INTERVALS}
    explored, passive = (simulated_episodes(CLUSTER, [name], **options) for name in ("random", "passive"))
    assert [e.record["seed"] for e in explored] == [e.record["seed"] for e in passive]
    np.testing.assert_array_equal(explored[3].view_KO[0], passive[3].view_KO[0])
    assert not any(e.paced for e in passive)
    assert {float(r) for e in passive for r in e.reward_K} == {0.0}
    action_NA = np.concatenate([e.action_KA for e in explored])
    assert 0.05 < (action_NA == -1.0).all(axis=1).mean() < 1.0
    assert action_NA.max() > 0.5


def test_a_behaviour_with_another_mechanism_is_refused() -> None:
    with pytest.raises(InputError, match=r"behaviour static:slack=0.1/0.1: settings of slack; allowed: of phase_shift"):
        simulated_episodes(CLUSTER, ["static:slack=0.1/0.1"], mechanisms=("phase_shift",), episodes=1, intervals=2)
    with pytest.raises(InputError, match="it needs to know the future"):
        simulated_episodes(CLUSTER, ["clairvoyant"], mechanisms=("phase_shift",), episodes=1, intervals=2)


# Traces


class Watching(Static):
    """Fixed settings, and what the ranks saw at each decision."""

    def reset(self, rows: int) -> None:
        self.seen: list[NDArray[np.float32]] = []

    def constant(self) -> None:  # so that views are made
        return None

    def act(self, signals_BO: NDArray[np.float32]) -> NDArray[np.float64]:
        self.seen.append(signals_BO.copy())
        return super().act(signals_BO)


def recorded(tmp_path: Path, cluster: str, policy: Static) -> Trace:
    simulator = start(load_cluster(cluster), np.array([1]))
    with RecordingWriter(tmp_path / "run.parquet", simulator, cluster) as writer:
        run(policy, simulator, 20 * (INTERVALS + 1), on_recording=writer.append)
    return read_trace(tmp_path / "run.parquet")


@pytest.mark.parametrize("cluster", ["two-jobs", "unequal-slack"])
def test_views_of_a_trace_are_what_the_ranks_saw(cluster: str, tmp_path: Path) -> None:
    """The trace begins after the quiet start, so that only the baselines have seen less; the rest agrees."""
    policy = Watching({"phase_shift": (0.05, 0.15)})
    stamps = read_job(recorded(tmp_path, cluster, policy))
    first = int(stamps.iteration_T[0])  # an iteration needs the end of the one before
    assert first <= 1
    seen_KRO = np.stack(policy.seen)
    for rank in (0, 5):
        view_KO = rank_views(stamps, rank, 20)
        names = ("step_cv", "comm_share", "delay_share")
        for name in names:
            at = signals.NAMES.index(name)
            np.testing.assert_allclose(view_KO[3:7, at], seen_KRO[3:7, rank, at], atol=0.12, err_msg=name)


def test_a_trace_without_pacing_has_the_null_action_only(tmp_path: Path) -> None:
    trace = recorded(tmp_path, "two-jobs", Static({}, "passive"))
    episodes = trace_episodes(trace, mechanisms=("phase_shift",))
    assert len(episodes) == CLUSTER.ranks
    assert not any(e.paced for e in episodes)
    assert np.concatenate([e.reward_K for e in episodes]).mean() == pytest.approx(1.0, abs=0.05)
    paired = trace_episodes(trace, mechanisms=("phase_shift",), reward="paired")
    assert abs(float(np.concatenate([e.reward_K for e in paired]).mean())) < 0.02
    with pytest.raises(InputError, match="but nobody was delayed; leave them out"):
        trace_episodes(trace, mechanisms=("phase_shift",), settings=SETTINGS)
    with pytest.raises(InputError, match="iterations alike; allowed: at least 600"):
        trace_episodes(trace, mechanisms=("phase_shift",), interval_iterations=200)


def test_delays_of_a_trace_need_the_settings_behind_them(tmp_path: Path) -> None:
    trace = recorded(tmp_path, "two-jobs", Static({"phase_shift": (0.05, 0.15)}))
    with pytest.raises(InputError, match="delays, but not the settings behind them; add --settings"):
        trace_episodes(trace, mechanisms=("phase_shift",))
    episodes = trace_episodes(trace, mechanisms=("phase_shift",), settings=SETTINGS)
    settings_KM2 = pacing.decode_action(episodes[0].action_KA, ("phase_shift",))
    on_K = settings_KM2[:, pacing.PHASE_SHIFT, pacing.WINDOW] > 0.0
    assert on_K.any()
    np.testing.assert_allclose(settings_KM2[on_K, pacing.PHASE_SHIFT], [[0.05, 0.15]] * int(on_K.sum()), rtol=1e-5)
    with pytest.raises(InputError, match="settings adaptive; allowed: fixed ones"):
        trace_episodes(trace, mechanisms=("phase_shift",), settings="adaptive")


# Data sets


def test_minari_reads_what_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    episodes = simulated_episodes(
        CLUSTER, ["random", "passive"], mechanisms=("phase_shift",), episodes=3, intervals=INTERVALS
    )
    env = {"cluster": "two-jobs", "mechanisms": ["phase_shift"], "episode_intervals": INTERVALS}
    name = "paceenv/two-jobs-v0"
    write_dataset(name, episodes, ("phase_shift",), description="a test", env=env, folder=tmp_path)
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import minari

        data = minari.load_dataset(name)
        found = list(data.iterate_episodes())
        recovered = data.recover_environment()
    assert (data.total_episodes, data.total_steps) == (6, 6 * INTERVALS)
    for mine, theirs in zip(episodes, found, strict=True):
        np.testing.assert_array_equal(theirs.observations, mine.view_KO)
        np.testing.assert_array_equal(theirs.actions, mine.action_KA)
        np.testing.assert_array_equal(theirs.rewards, mine.reward_K)
        assert theirs.truncations.tolist() == [False] * (INTERVALS - 1) + [True]
        assert not theirs.terminations.any()
    np.testing.assert_array_equal(recovered.reset(seed=0)[0], found[0].observations[0])
    assert not {"episode_intervals", "mechanisms"} & set(gymnasium.spec("paceenv/Pacing-v0").kwargs), "as registered"

    read = read_dataset(name, tmp_path)
    assert read.mechanisms == ("phase_shift",)
    np.testing.assert_array_equal(read.next_view_NO[INTERVALS - 1], episodes[0].view_KO[-1])
    np.testing.assert_array_equal(read.view_NO[INTERVALS], episodes[1].view_KO[0])
    with pytest.raises(InputError, match="exists; allowed: another name or version"):
        write_dataset(name, episodes, ("phase_shift",), description="again", folder=tmp_path)
    with pytest.raises(InputError, match="with a version: paceenv/two-jobs-v0"):
        write_dataset("no version", episodes, ("phase_shift",), description="", folder=tmp_path)
    with pytest.raises(InputError, match=r"paceenv/other-v0: cannot be read .*; on this machine: paceenv/two-jobs-v0"):
        read_dataset("paceenv/other-v0", tmp_path)


# Learning


def bandit(best: float, worth: float = 1.0, rows: int = 4000) -> Transitions:
    """Actions at random, of which the nearer to ``best`` the better; views say nothing."""
    random = np.random.default_rng(0)
    view_NO = random.uniform(-0.1, 0.1, (rows, signals.SIGNALS)).astype(np.float32)
    action_NA = random.uniform(-1.0, 1.0, (rows, 2)).astype(np.float32)
    reward_N = (-worth * (action_NA[:, 1] - best) ** 2).astype(np.float32)
    return Transitions(view_NO, action_NA, reward_N, view_NO[::-1].copy(), ("phase_shift",), {})


def test_td3_bc_finds_the_better_actions_of_the_data_and_cloning_their_mean() -> None:
    data = bandit(best=0.6)
    found = {
        name: learn_offline(data, OfflineConfig(algorithm=name, updates=400, hidden=32))
        .policy.action(data.view_NO[:64])[:, 1]
        .mean()
        for name in ("td3_bc", "bc")  # type: ignore[misc]
    }
    assert found["td3_bc"] == pytest.approx(0.6, abs=0.3)
    assert found["bc"] == pytest.approx(0.0, abs=0.15)
    assert found["td3_bc"] > found["bc"] + 0.2


def test_the_same_data_and_seed_give_the_same_policy() -> None:
    data, config = bandit(best=-0.2, rows=600), OfflineConfig(updates=40)
    first, again = (learn_offline(data, config).policy.layers for _ in range(2))
    other = learn_offline(data, OfflineConfig(updates=40, seed=1)).policy.layers
    assert all(
        np.array_equal(a, b) for one, two in zip(first, again, strict=True) for a, b in zip(one, two, strict=True)
    )
    assert not np.array_equal(first[0][0], other[0][0])


def test_one_action_teaches_nothing_about_others() -> None:
    data = bandit(best=0.0, rows=600)
    data.action_NA[:] = -1.0
    with pytest.raises(InputError, match="one action in all of 600 intervals; allowed for td3_bc: at least two"):
        learn_offline(data, OfflineConfig(updates=1))
    copied = learn_offline(data, OfflineConfig(algorithm="bc", updates=300))
    settings = copied.policy.act(data.view_NO[:8])
    assert not settings[..., pacing.WINDOW].any(), "the copy of nobody pacing paces nothing"


# Commands


def test_from_the_command_line_to_a_policy(tmp_path: Path) -> None:
    runner, folder = CliRunner(), ["--folder", str(tmp_path / "sets")]
    made = runner.invoke(
        application, ["simulate", "paceenv/random-v0", "--episodes", "4", "--intervals", "6", *folder, "--json", "-"]
    )
    assert made.exit_code == 0, made.output
    summary = json.loads(made.output)
    assert (summary["episodes"], summary["intervals"], summary["dataset"]) == (4, 24, "paceenv/random-v0")
    assert 1 <= summary["paced_episodes"] <= 4
    recorded(tmp_path, "two-jobs", Static({}, "passive"))
    told = runner.invoke(application, ["trace", "paceenv/mine-v0", str(tmp_path / "run.parquet"), *folder])
    assert told.exit_code == 0, told.output
    assert "Nobody paced" in told.output
    out = tmp_path / "offline.safetensors"
    arguments = ["train", "paceenv/random-v0", "-o", str(out), "--updates", "5", *folder]
    assert runner.invoke(application, arguments).exit_code == 0
    content = load_policy(out)
    assert content.provenance["dataset"]["dataset_id"] == "paceenv/random-v0"
    assert content.policy.squashes
    for bad, said in ((["--algorithm", "dqn"], "td3_bc or bc"),):
        refused = runner.invoke(application, [*arguments, *bad])
        assert isinstance(refused.exception, InputError)
        assert said in str(refused.exception)
