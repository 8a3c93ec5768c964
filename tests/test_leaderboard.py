"""Scores by a fixed protocol: what they say, that nobody could know the clusters, and that a false row is named."""

from __future__ import annotations

import hashlib
import json
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceenv.cli import application
from paceenv.core.errors import InputError
from paceenv.policies import saved
from paceenv.policies.learned import Learned
from paceenv.policies.policy_file import PolicyFile, save_policy
from paceenv.sim.engine.simulator import TRAINING_SEEDS
from paceenv.trainers import score_command
from paceenv.trainers.evaluation import leaderboard, score_row
from paceenv.trainers.evaluation.protocol import FIRST_SEED, SCORED_SPLITS, Protocol, load_protocol
from paceenv.trainers.training import selection
from paceenv.ui import config_files

ROOT = Path(__file__).resolve().parents[1]
ROWS = ROOT / "configs" / "leaderboard"
SHIFT = "static:phase_shift=0.1/0.2"


def run(*arguments: str) -> int:
    """A command line; the entry points are looked up here, so that an older installation finds them, too."""
    entry = EntryPoint(arguments[0], f"paceenv.trainers.score_command:{arguments[0]}", application.GROUP)
    return application._run_command(entry, list(arguments[1:]))


def network(path: Path, window: float) -> str:
    """A policy file that always shifts phases by as much; its digest."""
    action = np.array([-0.4, window], np.float32)
    policy = Learned([(np.zeros((2, 10), np.float32), action)], ["phase_shift"])
    provenance = {"config": {"algorithm": "ppo"}, "seeds": {"first": 3}, "timesteps": 1000}
    return save_policy(path, PolicyFile(policy, {}, provenance))


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    folder = tmp_path / "rows"
    data = {"version": 4, "seeds": 2, "iterations": 60, "clusters": 3, "drawn_from": ["a" * 64]}
    config_files.write_yaml(folder / "protocol.yaml", data)
    return folder


# The protocol


def test_training_and_selection_cannot_reach_the_episodes_of_scores() -> None:
    protocol = load_protocol()
    scored = set(range(FIRST_SEED, FIRST_SEED + protocol.seeds))
    assert max(scored) < TRAINING_SEEDS
    assert not scored & set(range(selection.FIRST_SEED, selection.FIRST_SEED + 10_000))


def test_clusters_follow_from_the_digests_of_all_policies_that_were_final() -> None:
    one, other = (Protocol(version=1, clusters=4, drawn_from=digests) for digests in (["a", "b"], ["a", "c"]))
    assert one.cluster_seed == Protocol(version=1, drawn_from=["b", "a"]).cluster_seed != other.cluster_seed
    for split in ("held-out", "random"):
        assert one.fingerprint(split) != other.fingerprint(split)  # type: ignore[arg-type]
    assert one.fingerprint("validation") == other.fingerprint("validation")
    config = load_protocol()
    for split in ("held-out", "random"):
        suite = config.suite(split)  # type: ignore[arg-type]
        assert len(suite.cases) == config.clusters
        assert {case.split for case in suite.cases} == {"held-out"}


# A row


def test_a_row_says_what_evaluate_says_and_is_made_again(rows: Path, tmp_path: Path) -> None:
    digest = network(tmp_path / "runs" / "policy.safetensors", 0.5)
    (tmp_path / "runs" / "training.json").write_text(json.dumps({"seed": 3, "cpu_s": 90.0}))
    assert (
        run("score", "-p", str(tmp_path / "runs"), "--name", "mine", "--enter", str(rows), "-o", str(rows / "x")) == 0
    )
    row, protocol = score_row.load_row(rows / "mine.held-out.json"), load_protocol(rows)
    [one] = row.policies
    assert (one.sha256, one.algorithm, one.training_seed, one.decisions, one.cpu_minutes) == (
        digest,
        "ppo",
        3,
        1000,
        1.5,
    )
    assert hashlib.sha256((rows / one.policy).read_bytes()).hexdigest() == digest
    assert score_row.load_row(rows / "x").policies[0].gains == one.gains
    suite = protocol.suite("held-out")
    assert list(one.gains) == [case.name for case in suite.cases]
    for case in suite.cases:
        assert one.clusters[case.name]["gain"] == pytest.approx(np.mean(one.gains[case.name]), abs=1e-6)
        assert one.clusters[case.name]["null"] == case.null_case
    score_row.check(row, protocol, rows, len(suite.cases), 0)
    nulls = {case.name: float(np.mean(one.gains[case.name])) for case in suite.cases if case.null_case}
    assert (one.worst_null is None) == (not nulls)
    if one.worst_null is not None:
        assert one.worst_null[1] == pytest.approx(min(nulls.values()), abs=1e-6)


def summary(own: list[float], other: list[float]) -> dict[str, Any]:
    suite = Protocol(version=1, clusters=3, seeds=4, drawn_from=["x"]).suite("held-out")
    cases = [case.model_copy(update={"null_case": k == 2}) for k, case in enumerate(suite.cases)]
    suite = suite.model_copy(update={"cases": cases})
    gains = [{c.name: np.full(4, g) for c, g in zip(cases, one, strict=True)} for one in (own, other)]
    return score_row.summarise(gains[0], gains, suite)


def test_the_gap_is_the_mean_share_of_the_best_where_there_is_something_to_win() -> None:
    assert summary([0.1, 0.001, -0.02], [0.2, 0.002, 0.0])["gap_closed"] == pytest.approx(0.5), "nothing on the second"
    found = summary([0.1, 0.3, -0.02], [0.2, 0.1, 0.5])
    assert found["gap_closed"] == pytest.approx(0.75), "its own best counts as the bound"
    assert found["worst_null"][1] == pytest.approx(-0.02)
    assert summary([0.001, 0.0, 0.0], [0.0, 0.0, 0.0])["gap_closed"] is None


def test_a_score_shows_where_its_gain_comes_from() -> None:
    found = summary([0.01, 0.001, -0.05], [0.02, 0.002, 0.0])
    one = score_row.Scored(policy="a", gains={}, **found)
    _, gain, winnable, elsewhere, closed, *_ = score_command._shown(one)
    assert (gain, winnable, elsewhere, closed) == ("-1.30%", "+1.00%", "-2.45%", "50%"), "it loses, and closes half"
    one = score_row.Scored(policy="a", gains={}, **summary([0.0, 0.0, 0.0], [0.0, 0.0, 0.0]))
    assert score_command._shown(one)[2:5] == ("", "+0.00%", "")


def test_a_policy_that_looks_ahead_is_run_where_no_row_has_it(rows: Path) -> None:
    protocol = load_protocol(rows)
    without = score_row.score([SHIFT], "random", protocol, name="a")
    assert leaderboard.bound_of(rows, protocol, "random") is None
    score_row.enter(score_row.score(["clairvoyant"], "random", protocol, name="clairvoyant"), rows)
    bound = leaderboard.bound_of(rows, protocol, "random")
    assert bound is not None
    again = score_row.score([SHIFT], "random", protocol, name="a", bound=bound)
    assert again.policies == without.policies
    assert again.scoring_cpu_s <= without.scoring_cpu_s + 1.0


# The table


def test_a_row_that_says_what_its_policy_does_not_do_is_named(rows: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for split in ("random", "held-out"):
        assert run("score", "-p", SHIFT, "--split", split, "--enter", str(rows), "--name", "shift") == 0
    network(rows / "a.safetensors", 0.5)
    arguments = ("--split", "random", "--enter", str(rows))
    assert run("score", "-p", str(rows / "a.safetensors"), *arguments, "--name", "honest", "--cpu-minutes", "2") == 0
    assert run("leaderboard", str(rows), "--check", "3", "--write", str(rows / "page.md")) == 0
    data = json.loads((rows / "honest.random.json").read_text())

    def spoil(name: str, **changed: Any) -> None:
        one = {**data["policies"][0], **changed.pop("policy", {})}
        (rows / f"{name}.random.json").write_text(json.dumps({**data, "name": name, "policies": [one], **changed}))

    better = {cluster: [gain + 0.01 for gain in gains] for cluster, gains in data["policies"][0]["gains"].items()}
    spoil("better", policy={"gains": better})
    spoil("other-file", policy={"sha256": "0" * 64})
    spoil("no-file", policy={"policy": "policies/none.safetensors"})
    spoil("fewer", policy={"gains": dict([*data["policies"][0]["gains"].items()][:1])})
    spoil("of-a-class", policy={"policy": "my_agent:Mine", "sha256": None})
    spoil("old", fingerprint="0" * 16, protocol=3)
    spoil("wrong", split="train")
    spoil("no-number", policy={"gains": {cluster: [float("nan")] * len(g) for cluster, g in better.items()}})
    (rows / "honest2.random.json").write_text(json.dumps(data))
    (rows / "junk.json").write_text("[[")
    capsys.readouterr()
    with pytest.raises(InputError) as caught:
        run("leaderboard", str(rows), "--check", "3", "--json", "-")
    found = json.loads(capsys.readouterr().out)
    for name, reason in {
        "better.random.json": "when it is made again",
        "other-file.random.json": "not the file that was scored: its digest differs",
        "no-file.random.json": "no such file",
        "fewer.random.json": "gains of other clusters",
        "of-a-class.random.json": "a class, which nobody else can run",
        "old.random.json": "version 3 of the protocol, or other clusters; allowed: version 4",
        "wrong.random.json": "split = 'train'; allowed: ",
        "no-number.random.json": "input should be a finite number",
        "honest2.random.json": "a second row named honest",
        "junk.json": "not a score",
    }.items():
        assert reason in found["refused"][name]
    assert len(found["refused"]) == 10
    assert "10 rows in all" in str(caught.value)
    assert {row["agent"]: row["final before the draw"] for row in found["rows"]} == {
        "shift": "by hand",
        "honest": "**no**",
    }
    assert {row["agent"]: row["CPU-minutes"] for row in found["rows"]} == {"shift": "", "honest": "2.0"}
    assert found["rows"][0]["agent"] == "shift", "sorted by the held-out clusters"


def test_a_new_draw_scores_all_rows_again_on_clusters_that_follow_from_them(rows: Path) -> None:
    digests = [network(rows / "runs" / f"seed-{k}" / "policy.safetensors", 0.3 + 0.1 * k) for k in range(2)]
    for split in ("held-out", "random"):
        assert run("score", "-p", str(rows / "runs"), "--name", "ppo", "--split", split, "--enter", str(rows)) == 0
    before = score_row.load_row(rows / "ppo.held-out.json")
    assert run("leaderboard", str(rows), "--draw", "--check", "1", "--write", str(rows / "page.md")) == 0
    protocol, after = load_protocol(rows), score_row.load_row(rows / "ppo.held-out.json")
    assert (protocol.version, protocol.drawn_from) == (5, sorted(digests))
    assert before.fingerprint != after.fingerprint == protocol.fingerprint("held-out")
    assert [one.sha256 for one in after.policies] == [one.sha256 for one in before.policies]
    [line] = [line for line in (rows / "page.md").read_text().splitlines() if line.startswith("| ppo | ppo | 2 |")]
    assert line.endswith("| yes |")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("score", "-p", "no-such"), "policy no-such: no such file"),
        (("score", "-p", "."), "--policy .: no policy.safetensors; allowed: a policy, or a folder of paceenv train"),
        (("leaderboard", "no-such"), "no-such: no such folder; allowed: a folder of rows"),
    ],
)
def test_wrong_arguments_are_one_line(
    arguments: tuple[str, ...], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError) as caught:
        run(*arguments)
    assert expected in str(caught.value)


@pytest.mark.slow
def test_the_committed_rows_are_of_the_protocol_and_the_page_is_theirs() -> None:
    protocol = load_protocol(ROWS)
    board = leaderboard.read_board(ROWS, protocol, clusters=0)
    assert board.refused == {}
    assert {row.split for row in board.rows} == set(SCORED_SPLITS)
    assert {"learned", "clairvoyant"} <= {row.name for row in board.rows}
    assert hashlib.sha256(saved.released().read_bytes()).hexdigest() in protocol.drawn_from
    assert (ROOT / "docs" / "evidence" / "leaderboard.md").read_text() == leaderboard.page(board)


def test_a_committed_row_is_made_again() -> None:
    row = score_row.load_row(ROWS / "learned.held-out.json")
    score_row.check(row, load_protocol(ROWS), ROWS, 2, 0)


def test_a_row_is_entered_once_and_replaced_only_by_name(rows: Path, tmp_path: Path) -> None:
    for folder, window in (("a", 0.3), ("b", 0.5)):
        network(tmp_path / folder / "policy.safetensors", window)
    arguments = ("--split", "random", "--enter", str(rows))
    mine, other = (str(tmp_path / folder / "policy.safetensors") for folder in ("a", "b"))
    assert run("score", "-p", mine, *arguments) == 0
    before = (rows / "policy.random.json").read_bytes()
    with pytest.raises(InputError, match=r"is the row of policy; allowed: --name with another name, or with this one"):
        run("score", "-p", other, *arguments)
    assert (rows / "policy.random.json").read_bytes() == before
    assert run("score", "-p", other, *arguments, "--name", "policy") == 0, "asked for by its name"
    assert run("score", "-p", other, *arguments) == 0, "the same policy"
    with pytest.raises(InputError, match="a class, which nobody else can run"):
        run("score", "-p", "my_agent:Mine", *arguments)
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be made a folder"):
        run("score", "-p", mine, "--split", "random", "--enter", str(tmp_path / "file"))


def test_a_folder_without_a_protocol_has_the_package_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Path | None] = []

    def load(folder: Path | None = None) -> Protocol:
        asked.append(folder)
        return load_protocol(ROWS)

    monkeypatch.setattr(score_command, "load_protocol", load)
    assert run("leaderboard", str(tmp_path)) == 0
    assert asked == [None]


def test_a_draw_replaces_no_row_where_one_cannot_be_made_again(rows: Path) -> None:
    network(rows / "a.safetensors", 0.5)
    for name, policy in (("first", str(rows / "a.safetensors")), ("last", SHIFT)):
        assert run("score", "-p", policy, "--split", "random", "--enter", str(rows), "--name", name) == 0
    data = json.loads((rows / "last.random.json").read_text())
    data["policies"][0] |= {"policy": "my_agent:Mine"}
    (rows / "last.random.json").write_text(json.dumps(data))
    before = {path: path.read_bytes() for path in rows.glob("*.*")}
    with pytest.raises(InputError, match="a class, which nobody else can run"):
        run("leaderboard", str(rows), "--draw")
    assert {path: path.read_bytes() for path in rows.glob("*.*")} == before
