"""Sweeps without Ray: what is tried does not depend on who was faster, the ledger holds, results are what was found."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from sweeps import begun, ended, run_here

from paceenv.cli import application
from paceenv.core import pacing, signals
from paceenv.core.errors import InputError
from paceenv.policies.names import rule
from paceenv.policies.policy_file import load_policy
from paceenv.trainers.evaluation.comparison import load_comparison
from paceenv.trainers.evaluation.suites import load_suite, load_suites
from paceenv.trainers.sweep.searches import AshaSearch, PbtSearch, Search, Trial, Work, changed
from paceenv.trainers.sweep.static_search import search_static, spelled
from paceenv.trainers.sweep.sweep_config import FIRST_SEED, Asha, Pbt, Range, SweepConfig
from paceenv.trainers.sweep.sweep_results import Candidate, Results
from paceenv.trainers.sweep.sweep_run import LEDGER, Ledger, make_search, make_task
from paceenv.trainers.sweep.trial import StaticTask, TrainingTask, run_trial
from paceenv.trainers.sweep.winner import _pieces, constant_policy, finish
from paceenv.ui import config_files
from paceenv.ui.config_files import names

SUITE = """
name: two
cases:
  - {cluster: two-jobs, weight: 2}
  - {cluster: incast-shallow}
"""
SMALL = {"splits": ["held-out"], "candidates_per_trial": 4, "seeds": 3, "iterations": 60}
GRID = {"values": {"phase_shift": {"threshold": [0.05, 0.3], "window": [0.05, 0.1, 0.3]}}, "combine": 1}
OPTUNA = {"candidates": 22, "first_random": 6, "open": 2}


@pytest.fixture
def suite(tmp_path: Path) -> str:
    (tmp_path / "two.yaml").write_text(SUITE)
    return str(tmp_path / "two.yaml")


def _config(suite: str, **static: Any) -> SweepConfig:
    given = {**SMALL, "suite": suite, "mechanisms": ["phase_shift", "stagger"], **static}
    return SweepConfig.model_validate({"name": "small", "static": given, "robustness": None})


def _all_trials(search: Search, result_of: Callable[[Work], Any], seed: int, at_once: int) -> dict[int, Work]:
    """Everything a search hands out, when trials run ``at_once`` and end in an order drawn from ``seed``."""
    random, waiting, running = np.random.default_rng(seed), [], []
    seen: dict[int, Work] = {}
    while True:
        waiting += search.ready()
        running += [waiting.pop(0) for _ in range(min(at_once - len(running), len(waiting)))]
        if not running:
            return seen
        trial: Trial = running.pop(int(random.integers(len(running))))
        assert trial.number not in seen
        seen[trial.number] = trial.work
        search.tell(trial, result_of(trial.work))


@pytest.mark.parametrize("search", [{"grid": GRID}, {"optuna": OPTUNA}, {"optuna": {**OPTUNA, "sampler": "nsga2"}}])
@pytest.mark.parametrize("scope", ["suite", "each"])
def test_which_settings_are_tried_does_not_depend_on_who_was_faster(
    search: dict[str, Any], scope: str, suite: str, tmp_path: Path
) -> None:
    if scope == "each" and "grid" in search:
        search = {"grid": {**GRID, "combine": 0}}

    def result_of(work: Work) -> Any:
        value = [
            [sum(w for _, _, w in setting) + 0.1 * c for c in range(len(work["clusters"]))]
            for setting in work["settings"]
        ]
        return None if len(work["settings"]) % 4 else {"gain": value, "cv": value}  # the last, shorter one fails

    config = _config(suite, scope=scope, **search)
    task = make_task(config, tmp_path)
    runs = [
        _all_trials(make_search(config, task), result_of, seed, at_once) for seed, at_once in ((0, 1), (1, 3), (2, 9))
    ]
    assert runs[0] == runs[1] == runs[2]
    assert len(runs[0]) == make_search(config, task).total
    tried = [tuple(map(tuple, setting)) for work in runs[0].values() for setting in work["settings"]]
    assert len(tried) == (22 * (2 if scope == "each" else 1) if "optuna" in search else len(set(tried)))


RANGES = {
    "sb3.learning_rate": Range(loguniform=(1e-4, 1e-2)),
    "sb3.arguments.batch_size": Range(choice=[256, 512, 1024]),
}


def _learned(work: Work) -> Any:
    """A made-up score: best at one learning rate, better with time; large batches fail."""
    values = work["hyperparameters"]
    if values["sb3.arguments.batch_size"] == 1024 and work["rung"] == 0:
        return None
    score = -abs(np.log(values["sb3.learning_rate"] / 1e-3)) + 0.1 * work["until"] / 100.0
    return {"score": score, "latest": score}


def test_halving_and_populations_do_not_depend_on_who_was_faster_and_end_with_the_best() -> None:
    asha = [
        _all_trials(AshaSearch(Asha(configs=18, workers=3), RANGES, 900, 0), _learned, seed, at_once)
        for seed, at_once in ((0, 1), (1, 2), (2, 3))
    ]
    assert asha[0] == asha[1] == asha[2]
    ends = {rung: {w["until"] for w in asha[0].values() if w["rung"] == rung} for rung in range(3)}
    assert ends == {0: {100}, 1: {300}, 2: {900}}
    begun = [work for work in asha[0].values() if work["rung"] == 0]
    last = [work for work in asha[0].values() if work["rung"] == 2]
    assert len(begun) == 18
    assert 1 <= len(last) <= 2
    alive = sorted((w for w in begun if _learned(w)), key=lambda w: -_learned(w)["score"])
    assert last[0]["config"] in {w["config"] for w in alive[:4]}
    for work in asha[0].values():
        if work["rung"]:
            parent = asha[0][work["from"]]
            assert (parent["config"], parent["rung"]) == (work["config"], work["rung"] - 1)

    pbt = [
        _all_trials(PbtSearch(Pbt(population=6, rounds=5), RANGES, 900, 0), _learned, seed, at_once)
        for seed, at_once in ((0, 1), (1, 4), (2, 6))
    ]
    assert pbt[0] == pbt[1] == pbt[2]
    assert len(pbt[0]) == 30
    first, final = ([_learned(pbt[0][n]) or {"score": -9.0} for n in members] for members in (range(6), range(24, 30)))
    assert np.mean([r["score"] for r in final]) > np.mean([r["score"] for r in first]) + 0.5
    assert {work["from"] for n, work in pbt[0].items() if n >= 6} <= set(range(24))
    assert all(_learned(pbt[0][w["from"]]) for w in pbt[0].values() if w["from"] is not None), "nobody copies a failure"


def test_a_member_that_collapsed_is_replaced_although_its_parent_was_the_best() -> None:
    search = PbtSearch(Pbt(population=4, rounds=2), RANGES, 900, 0)
    for trial, latest in zip(search.ready(), (-3.0, 0.4, 0.3, 0.2), strict=True):
        search.tell(trial, {"score": 0.9 if latest < 0 else 0.4, "latest": latest})
    assert [trial.work["from"] for trial in search.ready()] == [1, 1, 2, 3]


PIECES = """
name: pieces
environment:
  clusters: [{cluster: two-jobs}]
  mechanisms: [phase_shift]
  environments: 4
  threads: 1
  interval_iterations: 4
  episode_intervals: 4
selection: {every: 1, patience: 1, seeds: 2, iterations: 40}
total_timesteps: 96
sb3: {net_arch: [4], arguments: {n_steps: 4, batch_size: 16, n_epochs: 1}}
"""


def test_a_training_that_goes_on_has_its_patience_again_and_a_checkpoint_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five looks of which only the first gets better: with a patience of one, every piece ends after one look."""
    (tmp_path / "pieces.yaml").write_text(PIECES)
    keys = {"sb3.learning_rate": {"loguniform": [1e-4, 1.0]}}
    training = {"train": str(tmp_path / "pieces.yaml"), "hyperparameters": keys, "pbt": {}, "seeds": 1}
    task = make_task(SweepConfig.model_validate({"name": "pieces", "training": training}), tmp_path)
    found = iter([0.5, 0.4, 0.3, 0.2, 0.1])

    class Looks:
        def evaluate(self, policy: object) -> dict[str, float]:
            return {"gap_closed": 0.0, "null_loss": 0.0, "score": next(found)}

    monkeypatch.setattr("paceenv.trainers.sweep.trial._validation", lambda train_json, threads: Looks())
    rows = []
    for number, (parent, until) in enumerate([(None, 64), (0, 64), (1, 80), (2, 96)]):
        values = {"sb3.learning_rate": 0.001 * (number + 1)}
        work = {"kind": "training", "config": 0, "rung": 0, "hyperparameters": values, "from": parent, "until": until}
        rows.append(run_trial(task, Trial(number, work)))
    assert [row["status"] for row in rows] == ["done"] * 4
    assert [row["result"]["score"] for row in rows] == [0.5] * 4, "of the best policy, which is kept"
    assert [row["result"]["latest"] for row in rows] == [0.4, 0.3, 0.2, 0.1]
    assert [row["result"]["decisions"] for row in rows] == [[32], [48], [64], [80]]
    assert all(list((tmp_path / "trials" / f"{number:04d}").rglob("checkpoint.safetensors")) for number in range(4))


def test_changed_hyperparameters_stay_in_their_ranges() -> None:
    for seed in range(50):
        found = changed(
            {"sb3.learning_rate": 9.9e-3, "sb3.arguments.batch_size": 256}, RANGES, np.random.default_rng(seed)
        )
        assert 1e-4 <= found["sb3.learning_rate"] <= 1e-2
        assert found["sb3.arguments.batch_size"] in {256, 512, 1024}


@pytest.mark.parametrize("search", [{"grid": GRID}, {"optuna": OPTUNA}])
def test_a_sweep_that_was_cut_short_ends_like_one_that_was_not(
    search: dict[str, Any], suite: str, tmp_path: Path
) -> None:
    config = _config(suite, **search)
    whole = begun(config, tmp_path / "whole")
    run_here(whole)
    cut = tmp_path / "cut"

    class Killed(Exception):
        pass

    def kill(row: Any) -> None:
        raise Killed

    for _ in range(3):
        with pytest.raises(Killed):
            run_here(begun(config, cut), on_row=kill)
        with (cut / LEDGER).open("ab") as file:
            file.write(b'{"trial": 7, "work": {"ki')  # what a process leaves that is killed while it writes
    before = (cut / LEDGER).read_bytes().rpartition(b"\n")[0]
    assert len(before.splitlines()) == 4
    run_here(begun(config, cut))
    assert (cut / LEDGER).read_bytes().startswith(before)
    assert ended(cut) == ended(tmp_path / "whole")
    assert len((cut / LEDGER).read_text().splitlines()) == 1 + whole.search.total


def test_another_config_or_cluster_is_refused_and_named(suite: str, tmp_path: Path) -> None:
    config = _config(suite, grid=GRID)
    begun(config, tmp_path / "out")
    before = (tmp_path / "out" / LEDGER).read_bytes()
    with pytest.raises(InputError, match=r"begun with static\.seeds = 3, now 4; allowed: the same"):
        begun(_config(suite, grid=GRID, seeds=4), tmp_path / "out")
    Path(suite).write_text(SUITE.replace("weight: 2", "weight: 3"))
    with pytest.raises(InputError, match=r"begun with cases\.0\.weight = 2\.0, now 3\.0"):
        begun(config, tmp_path / "out")
    Path(suite).write_text(SUITE)
    assert (tmp_path / "out" / LEDGER).read_bytes() == before
    lines = before.decode().replace('"format":"paceenv.sweep/1"', '"format":"other/1"')
    (tmp_path / "out" / LEDGER).write_text(lines)
    with pytest.raises(InputError, match="not a sweep's ledger: format 'other/1'"):
        Ledger.read(tmp_path / "out")
    with pytest.raises(InputError, match="holds no sweep"):
        Ledger.read(tmp_path / "nothing")


def test_a_full_disk_is_an_error_and_leaves_no_half_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = Ledger.begin(tmp_path, {"config": {}, "inputs": {}})
    before = ledger.path.read_bytes()
    write, calls = os.write, []

    def half(descriptor: int, data: bytes) -> int:
        calls.append(1)
        if len(calls) > 1:
            raise OSError(28, "No space left on device")
        return write(descriptor, data[: len(data) // 2])

    monkeypatch.setattr(os, "write", half)
    with pytest.raises(InputError, match=r"ledger\.jsonl: cannot be written: No space left on device"):
        ledger.add({"trial": 0, "work": {}, "status": "done", "result": {}})
    assert ledger.path.read_bytes() == before
    assert not ledger.rows


def test_settings_score_as_in_the_search_for_the_best_static_one(suite: str, tmp_path: Path) -> None:
    """One way to evaluate a static setting: on the same seeds, its gains are the same numbers."""
    first = FIRST_SEED - 80  # the search takes seeds after those of the suite
    changed = {"seeds": 8, "first_seed": first, "iterations": 60, "mechanisms": ["phase_shift"]}
    asked = load_suite(suite).model_copy(update=changed)
    found = search_static(asked)
    config = _config(suite, mechanisms=["phase_shift"], seeds=2)
    sweep = begun(config, tmp_path / "out")
    run_here(sweep)
    by_label = {c.label: c for c in Results.of(sweep.ledger).candidates}
    assert len(by_label) == len(found.settings) == 24
    for setting, gain_CE in zip(found.settings, found.gain_SCE, strict=True):
        expected = float(np.median(gain_CE, axis=1) @ [2 / 3, 1 / 3])
        assert by_label[spelled(setting)].values["throughput"] == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize(
    "setting", [(("slack", 0.02, 0.3),), (("phase_shift", 0.05, 0.6), ("stagger", 1.0, 0.001)), ()]
)
def test_a_static_winner_is_a_policy_file_that_always_says_the_same(setting: Any) -> None:
    expected = sum((pacing.one_mechanism(*part) for part in setting), pacing.off())
    said = constant_policy(setting).act(np.random.default_rng(0).normal(size=(5, signals.SIGNALS)).astype(np.float32))
    np.testing.assert_allclose(said, np.broadcast_to(expected, said.shape), rtol=1e-6, atol=1e-9)


def test_a_finished_sweep_leaves_what_people_look_at(suite: str, tmp_path: Path) -> None:
    demo = config_files.load(SweepConfig, "sweeps", "demo")
    config = _config(suite, optuna=OPTUNA).model_copy(
        update={"robustness": demo.robustness.model_copy(update={"seeds": 2, "iterations": 60})}  # type: ignore[union-attr]
    )
    out = tmp_path / "out"
    sweep = begun(config, out)
    run_here(sweep)
    said = finish(sweep.ledger, sweep.task)
    results = Results.of(sweep.ledger)
    best, front = results.best(), results.front()
    assert best is not None
    assert best == front[0]
    assert best.values["throughput"] == max(c.values["throughput"] for c in results.candidates)
    assert [c.values["cv"] for c in front] == sorted((c.values["cv"] for c in front), reverse=True)
    for other in results.candidates:
        assert any(
            f.values["throughput"] >= other.values["throughput"] and f.values["cv"] <= other.values["cv"] for f in front
        )
    assert (out / "pareto.png").stat().st_size > 1000
    comparison = load_comparison(out / "winner.yaml")
    assert comparison.policies == [best.label]
    assert rule(best.label) is not None
    assert load_policy(out / "policy.safetensors").provenance["candidate"] == best.label
    assert said["robustness"]["totals"][0]["policy"] == best.label
    assert said["robustness"]["first_seed"] != FIRST_SEED
    scores = out / "scores.json"
    options = ["--seeds", "2", "-i", "60", "--json", str(scores)]
    assert application.run(["evaluate", str(out / "winner.yaml"), str(out / "policy.safetensors"), *options]) == 0
    rows = json.loads(scores.read_text())
    assert {row["cluster"] for row in rows} == {"two-jobs", "incast-shallow"}
    gains = {(row["policy"], row["cluster"]): row["throughput_gain"] for row in rows}
    for cluster in ("two-jobs", "incast-shallow"):
        assert gains["policy", cluster] == pytest.approx(gains[best.label, cluster], abs=2e-4)


def test_every_cluster_may_have_a_winner_of_its_own(suite: str, tmp_path: Path) -> None:
    """On one objective, too."""
    sweep = begun(_config(suite, scope="each", optuna=OPTUNA, objectives=["throughput"]), tmp_path / "out")
    run_here(sweep)
    finish(sweep.ledger, sweep.task)
    tuned = load_comparison(tmp_path / "out" / "winner.yaml").tuned
    assert set(tuned) == {"two-jobs", "incast-shallow"}
    results = Results.of(sweep.ledger)
    for cluster, policy in tuned.items():
        mine = [c for c in results.candidates if c.cluster == cluster]
        assert len(mine) == 22
        assert mine[0].label == "passive", "no winner is worse than no pacing"
        assert policy == max(mine, key=lambda c: c.values["throughput"]).label
    Path(suite).write_text(SUITE.replace("incast-shallow}", "incast-shallow, set: {job.compute_s: 0.3}}"))
    with pytest.raises(
        InputError, match="incast-shallow: changed since it was searched; allowed: the cluster as it was"
    ):
        application.run(["evaluate", str(tmp_path / "out" / "winner.yaml"), "--seeds", "2"])
    Path(suite).write_text(SUITE)
    assert (
        application.run(["evaluate", str(tmp_path / "out" / "winner.yaml"), "--seeds", "2", "-i", "60", "--json", "-"])
        == 0
    )
    with pytest.raises(
        InputError, match="tuned: nothing for two-jobs-other-period; allowed: a policy for every cluster"
    ):
        application.run(["evaluate", str(tmp_path / "out" / "winner.yaml"), "--suite", "demo", "--seeds", "2"])


@pytest.mark.parametrize("average", ["median", "mean"])
def test_what_counts_is_the_average_over_seeds(average: str, suite: str, tmp_path: Path) -> None:
    task = make_task(_config(suite, average=average), tmp_path)
    assert isinstance(task, StaticTask)
    setting = (("stagger", 0.5, 0.1),)
    found = task.run(0, {"clusters": ["two-jobs", "incast-shallow"], "settings": [setting]}, 1)
    gain_E = task.problem.score([setting]).gain_SCE[0, 1]
    wanted = {"median": np.median(gain_E), "mean": np.mean(gain_E)}
    assert abs(wanted["mean"] - wanted["median"]) > 1e-4
    assert found["gain"][0][1] == wanted[average]


def test_of_equal_settings_the_one_with_the_fewest_parameters_wins(suite: str) -> None:
    def candidate(trial: int, gain: float, *names: str) -> Candidate:
        return Candidate(trial, "+".join(names), "", len(names), {"throughput": gain, "cv": 0.1})

    tried = [candidate(0, 0.0, "slack.window", "phase_shift.window"), candidate(1, 0.0), candidate(2, -0.1)]
    results = Results(_config(suite, grid=GRID), ("throughput", "cv"), tried, [])
    assert results.best() == tried[1]
    assert results.front() == [tried[1]]


def test_a_folder_is_shown(suite: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    sweep = begun(_config(suite, grid=GRID), out)
    run_here(sweep)
    assert application.run(["sweep", str(out), "--json", "-"]) == 0
    best = Results.of(sweep.ledger).best()
    assert best is not None
    assert json.loads(capsys.readouterr().out)[0]["candidate"] == best.label
    assert application.run(["sweep", str(out)]) == 0
    assert best.label in capsys.readouterr().out
    with pytest.raises(InputError, match=r"--set with a sweep's folder, .*; allowed: --json"):
        application.run(["sweep", str(out), "--set", "seed=1"])
    with pytest.raises(InputError, match="demo: a config to run needs a folder; allowed: --out FOLDER"):
        application.run(["sweep", "demo"])


@pytest.mark.parametrize(
    ("static", "expected"),
    [
        (
            {"grid": {"values": {"phase_shift": {"threshold": [1.5], "window": [0.1]}}}},
            "threshold of phase_shift = 1.5; allowed: 0 to 1",
        ),
        ({"grid": {}, "optuna": {}}, "grid or optuna, one of the two"),
        ({"scope": "each", "grid": {}}, "grid.combine = 3 with scope: each; allowed: 0"),
        ({"splits": ["held-out", "held-out"]}, "splits = ['held-out', 'held-out']; allowed: each once"),
        ({"objectives": ["energy"]}, "objectives: energy on suite two: no cluster has power figures"),
        ({"optuna": {"sampler": "cmaes"}}, "optuna.sampler = 'cmaes'; allowed: input should be 'tpe' or 'nsga2'"),
    ],
)
def test_what_a_sweep_cannot_do_is_one_line_and_no_folder(
    static: dict[str, Any], expected: str, suite: str, tmp_path: Path
) -> None:
    given = {"name": "wrong", "static": {**SMALL, "suite": suite, **static}}
    (tmp_path / "wrong.yaml").write_text(json.dumps(given))
    with pytest.raises(InputError) as caught:
        application.run(["sweep", str(tmp_path / "wrong.yaml"), "-o", str(tmp_path / "out")])
    assert expected in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_hyperparameters_that_cannot_change_meanwhile_are_refused() -> None:
    training = {"train": "ppo", "hyperparameters": {"sb3.net_arch": {"choice": [[32], [64]]}}, "pbt": {}}
    with pytest.raises(ValueError, match=r"hyperparameter sb3\.net_arch with PBT; allowed: sb3\.learning_rate"):
        SweepConfig.model_validate({"name": "wrong", "training": training})
    with pytest.raises(ValueError, match="hyperparameter seed; allowed: sb3"):
        SweepConfig.model_validate(
            {"name": "wrong", "training": {**training, "hyperparameters": {"seed": {"choice": [1]}}}}
        )


@pytest.mark.parametrize("name", names("sweeps"))
def test_the_sweeps_that_ship_can_begin(name: str, tmp_path: Path) -> None:
    config = config_files.load(SweepConfig, "sweeps", name)
    if config.static is not None:
        assert load_suite(config.static.suite).only(config.static.splits).cases
    else:
        assert begun(config, tmp_path).next() is not None


def test_a_training_sweep_finds_its_files_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's workers change to a folder of their own."""
    (tmp_path / "pieces.yaml").write_text(PIECES.replace("{every: 1,", "{suites: [mine.yaml], every: 1,"))
    (tmp_path / "mine.yaml").write_text("name: mine\ncases: [{cluster: two-jobs, split: validation}]\n")
    monkeypatch.chdir(tmp_path)
    keys = {"sb3.learning_rate": {"loguniform": [1e-4, 1.0]}}
    training = {"train": "pieces.yaml", "hyperparameters": keys, "asha": {}, "seeds": 1}
    task = make_task(SweepConfig.model_validate({"name": "pieces", "training": training}), tmp_path)
    monkeypatch.chdir("/")
    assert isinstance(task, TrainingTask)
    assert task.train.selection is not None
    assert [case.name for case in load_suites(task.train.selection.suites, "all of it").cases] == ["two-jobs"]
    assert set(task.inputs()["validation"]) == {"two-jobs"}
    for key in ("sb3.gama", "distill.gamma"):
        wrong = {**training, "train": str(tmp_path / "pieces.yaml"), "hyperparameters": {key: {"choice": [0.9]}}}
        with pytest.raises(InputError, match=f"hyperparameter {key}; allowed: "):
            make_task(SweepConfig.model_validate({"name": "wrong", "training": wrong}), tmp_path)


def test_a_winner_says_which_trials_with_which_hyperparameters_made_it() -> None:
    work = {"kind": "training", "config": 0, "hyperparameters": {"sb3.arguments.gamma": 0.9}}
    rows = {
        0: {"work": {**work, "from": None, "until": 10}},
        3: {"work": {**work, "from": 0, "until": 20, "hyperparameters": {"sb3.arguments.gamma": 0.8}}},
    }
    pieces = _pieces(SimpleNamespace(rows=rows), 3)  # type: ignore[arg-type]
    assert [(one["trial"], one["hyperparameters"]["sb3.arguments.gamma"], one["until"]) for one in pieces] == [
        (0, 0.9, 10),
        (3, 0.8, 20),
    ]


def test_a_sweep_of_which_no_trial_was_finished_is_an_error(suite: str, tmp_path: Path) -> None:
    sweep = begun(_config(suite, grid=GRID), tmp_path / "out")
    while (trial := sweep.next()) is not None:
        failed = {"trial": trial.number, "work": dict(trial.work), "seeds": [1], "status": "failed", "error": "no luck"}
        sweep.record({**failed, "ran": {}})
    (tmp_path / "small.yaml").write_text(json.dumps(_config(suite, grid=GRID).model_dump(mode="json")))
    with pytest.raises(InputError, match="no trial was finished; trial 0 failed: no luck"):
        application.run(["sweep", str(tmp_path / "small.yaml"), "-o", str(tmp_path / "out")])


def test_a_comparison_names_no_code_and_its_files_lie_beside_it(tmp_path: Path) -> None:
    for given in ({"policies": ["os:abort"]}, {"tuned": {"two-jobs": "os:abort"}}):
        (tmp_path / "hostile.yaml").write_text(json.dumps({"suite": "demo", **given}))
        with pytest.raises(InputError, match="policy os:abort: a class, whose code would run; allowed: names and"):
            application.run(["evaluate", str(tmp_path / "hostile.yaml")])
    files = ["mine.safetensors:preference=0.2", "agent.zip:mechanisms=slack", "static:slack=0.1/0.2"]
    (tmp_path / "mine.yaml").write_text(json.dumps({"suite": "demo", "policies": files, "tuned": {"a": files[0]}}))
    found = load_comparison(tmp_path / "mine.yaml")
    assert found.policies == [f"{tmp_path}/{files[0]}", f"{tmp_path}/{files[1]}", *files[2:]]
    assert found.tuned == {"a": f"{tmp_path}/{files[0]}"}
