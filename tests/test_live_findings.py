"""Findings from toy jobs whose late rank is known, or why there is none; and the one page about a run."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from live_samples import ATTEMPT, snapshot
from toy_jobs import SHAPES, Phase, all_of, constant, pairs, run

from paceenv.live.record.findings import Findings, find, in_short, with_verdicts
from paceenv.live.record.run_folder import SUMMARY, write_status
from paceenv.live.record.side_by_side import Job
from paceenv.live.record.summary import WIDTH, summarise, write_summary

LATE_S = 0.02


def named(findings: Findings) -> dict[int, float]:
    """The late ranks and by how much, seconds."""
    verdicts = findings["verdicts"].items()
    return {int(rank): v["late_s"] for rank, v in verdicts if v["verdict"] == "late"}


def verdict(findings: Findings, rank: int) -> str:
    return str(findings["verdicts"][str(rank)]["verdict"])


def page(findings: Findings) -> str:
    return "\n".join(findings["text"])


@pytest.mark.parametrize(
    ("shape", "ranks"), [*((shape, 4 + 4 * (k % 2)) for k, shape in enumerate(SHAPES)), ("small", 2), ("ddp", 64)]
)
@pytest.mark.parametrize("late_phase", [0, -1])
def test_a_late_rank_is_named_with_its_lateness(shape: str, ranks: int, late_phase: int) -> None:
    phases = SHAPES[shape](ranks)
    for late in {1, ranks - 1}:
        snapshots = run(
            phases, ranks, late=constant(ranks, late, LATE_S), late_phase=late_phase % len(phases), iterations=160
        )
        findings = find(snapshots)
        assert named(findings) == {late: pytest.approx(LATE_S, rel=0.1)}, page(findings)
        assert f"rank {late} (node{late // 8}) is late by" in findings["text"][0]


@pytest.mark.parametrize(("shape", "ranks"), [*((shape, 8) for shape in SHAPES), ("ddp", 2), ("ddp", 64)])
def test_without_skew_nobody_is_named(shape: str, ranks: int) -> None:
    for seed in range(2):
        findings = find(run(SHAPES[shape](ranks), ranks, seed=seed, iterations=160))
        assert named(findings) == {}
        assert "not attributable" not in page(findings)
        transfers = shape in {"expert", "buffers"}  # only some ranks are blocked by one, and the others wait for them
        assert "all ranks arrive on time" in page(findings) or transfers


def test_a_rank_that_is_last_because_it_waited_is_not_late() -> None:
    findings = find(run(SHAPES["expert"](4), 4, late=constant(4, 1, LATE_S)))
    assert findings["text"][0] == (
        "rank 1 (node0) is late by 20 ms: rank 0 waits for it in all_to_all of ranks 0-1, "
        "ranks 2-3 wait for it in all_reduce of ranks 0-3"
    )
    assert [verdict(findings, rank) for rank in range(4)] == ["early", "late", "early", "early"]
    assert [findings["verdicts"][str(r)]["early_s"] for r in (0, 2, 3)] == [pytest.approx(LATE_S, rel=0.1)] * 3


def test_longer_work_that_nobody_waits_for_is_not_late() -> None:
    """Ranks 0 and 1 exchange for 20 ms, while the others compute: all arrive together."""
    phases = [Phase("all_to_all", [[0, 1]], 0.01, LATE_S), Phase("all_reduce", all_of(4))]
    findings = find(run(phases, 4, slow_s=(0.0, 0.0, LATE_S, LATE_S)))
    assert named(findings) == {}
    assert "longer than that of the others, but nobody was seen to wait for it" in page(findings)


@pytest.mark.parametrize("ranks", [4, 8])
def test_an_unseen_collective_of_some_ranks_hides_which_of_them_is_late(ranks: int) -> None:
    phases = [Phase("all_to_all", [[0, 1]], seen=False), Phase("all_reduce", all_of(ranks))]
    findings = find(run(phases, ranks, late=constant(ranks, 1, LATE_S)))
    assert named(findings) == {}
    assert {verdict(findings, rank) for rank in range(ranks)} == {"insufficient evidence"}
    assert "ranks 0-1: their own work takes up to" in page(findings)
    assert "collectives of ranks 0-1 could not be seen" in page(findings)


@pytest.mark.parametrize("late", [1, None])
def test_a_rank_without_an_agent_may_be_the_late_one(late: int | None) -> None:
    skew = None if late is None else constant(4, late, LATE_S)
    findings = find(run(SHAPES["ddp"](4), 4, late=skew, missing=[1]))
    assert named(findings) == {}
    assert {v["verdict"] for v in findings["verdicts"].values()} == {"insufficient evidence"}
    assert "not attributable: ranks 0, 2-3: rank 1 has no snapshot" in page(findings)


def test_collectives_of_other_threads_are_a_reason_for_doubt() -> None:
    snapshots = run(SHAPES["ddp"](4), 4, late=constant(4, 1, LATE_S))
    calm = run(SHAPES["ddp"](4), 4)
    for several in (snapshots, calm):
        for one in several:
            one["side"] = {"seconds": 0.03}
    assert named(find(snapshots)) == {}
    assert "it may be waiting for the collectives of other threads" in page(find(snapshots))
    assert "up to 30 ms in collectives that were put aside: other threads wait for them" in page(find(calm))
    assert "on time" not in page(find(calm))


@pytest.mark.parametrize("groups", [True, False])
def test_where_nothing_was_seen_the_page_says_that(groups: bool) -> None:
    snapshots = run(SHAPES["ddp"](2), 2)
    for one in snapshots:
        one |= {"collectives": []} if groups else {"collectives": [], "groups": {}}
    findings = find(snapshots)
    why = "no collective is known to connect it with another rank that has a snapshot"
    assert {verdict["evidence"] for verdict in findings["verdicts"].values()} == {why}
    assert "put aside" not in page(findings)


@pytest.mark.parametrize(
    ("when", "late_s", "names", "says"),
    [
        (
            lambda i: 2 if i >= 300 else None,
            LATE_S,
            {2: pytest.approx(LATE_S, rel=0.1)},
            "rank 2 (node0) is late by 20 ms since iteration 296: ranks 0-1, 3 wait for it",
        ),
        (
            lambda i: 2 if i == 300 else None,
            0.5,
            {},
            "rank 2 was late once, by 62.7 ms a step, in iterations 296 to 303",
        ),
        (lambda i: i % 4, LATE_S, {}, "each of ranks 0-3 waited at least 15 ms per step"),
        (lambda i: i // 16 % 4, LATE_S, {}, "each of ranks 0-3 waited at least 15 ms per step"),
    ],
)
def test_lateness_has_its_beginning_and_none_is_named_for_what_is_over_or_varies(
    when: Callable[[int], int | None], late_s: float, names: dict[int, Any], says: str
) -> None:
    def extra(iteration: int) -> np.ndarray[Any, Any]:
        return np.array([late_s * (rank == when(iteration)) for rank in range(4)])

    findings = find(run(SHAPES["ddp"](4), 4, late=extra))
    assert named(findings) == names
    assert says in page(findings)


def test_a_rank_that_comes_later_but_not_surely_is_not_on_time() -> None:
    noise = np.random.default_rng(4).gamma(2.0, 0.004, (400, 2)) + np.array([0.0, 0.008])
    findings = find(run(SHAPES["ddp"](2), 2, late=lambda i: noise[i], iterations=160))
    assert named(findings) == {}
    assert verdict(findings, 1) == "insufficient evidence", page(findings)
    assert "longer, and varies too much to be sure" in page(findings)


def pipeline(stages: int, replicas: int, weights: dict[int, float]) -> list[Phase]:
    """Rank ``stage * replicas + replica``; activations go up, gradients come down, and replicas reduce."""
    up = [[[s * replicas + r, (s + 1) * replicas + r] for r in range(replicas)] for s in range(stages - 1)]
    lanes = [[s * replicas + r for s in range(stages)] for r in range(replicas)]
    phases = [Phase("recv", hop, 0.004, 0.0002, weights=weights) for hop in up]
    phases += [Phase("recv", [pair[::-1] for pair in hop], 0.004, 0.0002, weights=weights) for hop in up[::-1]]
    if replicas > 1:
        phases.append(
            Phase("all_reduce", [list(range(s * replicas, (s + 1) * replicas)) for s in range(stages)], 0.001)
        )
    phases.append(Phase("all_reduce", lanes, 0.001))
    return phases


@pytest.mark.parametrize(("stages", "replicas"), [(2, 2), (3, 1)])
def test_a_pipeline_stage_with_more_layers_is_not_late(stages: int, replicas: int) -> None:
    ranks = stages * replicas
    phases = pipeline(stages, replicas, dict.fromkeys(range(ranks - replicas, ranks), 4.0))
    assert named(find(run(phases, ranks))) == {}
    assert set(named(find(run(phases, ranks, late=constant(ranks, 1, LATE_S))))) <= {1}


def test_ranks_that_do_not_share_their_steps_are_not_compared() -> None:
    snapshots = run(SHAPES["ddp"](4), 4)
    for name in ("own_s", "step_s"):
        blocks = snapshots[3]["own"]["blocks"]
        blocks[name] = [2.0 * value for value in blocks[name]]  # it ticks every second step
    findings = find(snapshots)
    assert named(findings) == {}
    assert "rank 3 does not have the same steps as the other ranks" in page(findings)
    assert "on time" not in page(findings)


def test_blocks_of_different_lengths_are_brought_together() -> None:
    snapshots = run(SHAPES["ddp"](2), 2, late=constant(2, 1, LATE_S))
    blocks = snapshots[0]["own"]["blocks"]
    for name in ("own_s", "step_s"):
        blocks[name] = np.reshape(blocks[name], (-1, 2)).mean(axis=1).tolist()
    blocks["steps"] = [2 * steps for steps in blocks["steps"][::2]]
    blocks["iterations"] *= 2
    assert named(find(snapshots)) == {1: pytest.approx(LATE_S, rel=0.1)}


def test_a_last_block_with_other_steps_is_left_out() -> None:
    """Rank 1 was heard later, and in the meantime all were slow: that is no lateness."""
    snapshots = run(SHAPES["ddp"](2), 2, iterations=256)
    for one, steps, extra_s in zip(snapshots, (2, 4), (0.0, 5.0), strict=True):
        blocks = one["own"]["blocks"]
        blocks["steps"] = [*[4] * 63, steps]
        blocks["own_s"][-1] += extra_s
    assert "late" not in page(find(snapshots))


@st.composite
def jobs(draw: st.DrawFn) -> tuple[list[Phase], int, list[float], int, list[int], int]:
    """A random program, some slow ranks (a minority), where they are slow, ranks without an agent, a seed."""
    ranks = draw(st.sampled_from([4, 8]))
    groupings = [all_of(ranks), pairs(ranks), pairs(ranks, 2), [[0, 1]], [list(range(ranks // 2))]]
    ops = ["all_reduce", "all_to_all", "reduce_scatter", "broadcast", "all_gather"]
    phases = [
        Phase(
            draw(st.sampled_from(ops)),
            draw(st.sampled_from(groupings)),
            draw(st.sampled_from([0.001, 0.01])),
            draw(st.sampled_from([0.0001, 0.004])),
            seen=draw(st.sampled_from([True, True, True, False])),
        )
        for _ in range(draw(st.integers(1, 4)))
    ]
    slow = draw(st.lists(st.integers(0, ranks - 1), max_size=ranks // 2 - 1, unique=True))
    slow_s = [0.0] * ranks
    for rank in slow:
        slow_s[rank] = draw(st.sampled_from([0.005, 0.02]))
    missing = draw(st.lists(st.integers(0, ranks - 1), max_size=1))
    return phases, ranks, slow_s, draw(st.integers(0, len(phases) - 1)), missing, draw(st.integers(0, 99))


@given(jobs())
def test_no_rank_is_named_whose_own_work_is_not_longer(
    job: tuple[list[Phase], int, list[float], int, list[int], int],
) -> None:
    phases, ranks, slow_s, late_phase, missing, seed = job
    findings = find(run(phases, ranks, slow_s=slow_s, late_phase=late_phase, missing=missing, seed=seed, iterations=96))
    assert set(named(findings)) <= {rank for rank, late_s in enumerate(slow_s) if late_s}, page(findings)
    for rank, late_s in named(findings).items():
        assert late_s <= slow_s[rank] + 0.002, page(findings)
    if any(not phase.seen for phase in phases):
        assert "all ranks arrive on time" not in page(findings)


JSON = st.recursive(
    st.none() | st.booleans() | st.floats(allow_nan=True) | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
SAMPLE = run(SHAPES["expert"](4), 4, iterations=64)


@given(st.dictionaries(st.sampled_from(sorted(set(SAMPLE[0]) - {"rank"})), JSON, max_size=4), st.integers(0, 3), JSON)
def test_no_snapshot_breaks_the_findings(changed: dict[str, Any], rank: int, inner: Any) -> None:
    snapshots = [dict(snapshot) for snapshot in SAMPLE]
    snapshots[0] = snapshots[0] | {"own": snapshots[0]["own"] | {"blocks": inner}}
    snapshots[rank] |= changed
    findings = find(snapshots)
    assert set(findings["verdicts"]) == {"0", "1", "2", "3"}
    json.dumps(findings, allow_nan=False)
    assert "arrival" in with_verdicts(snapshots, findings)[rank]


@pytest.mark.parametrize(
    ("ends", "says"),
    [
        ({}, "all ranks arrive on time"),
        (
            {1: {"ended": "ValueError: no luck (train.py:7)", "unix_time_s": 1.0}, 0: {"ended": "RuntimeError"}},
            "rank 1 raised ValueError: no luck (train.py:7), after 160 iterations; after it, rank 0 raised, too",
        ),
        (
            {0: {"ended": "RuntimeError: Timed out waiting 25000ms"}, 1: {"ended": "SIGTERM"}},
            "ranks 1-3 raised nothing, and the others waited in vain: look there first",
        ),
        (
            {1: None} | {rank: {"ended": "RuntimeError: Connection reset by peer"} for rank in (0, 2, 3)},
            "rank 1 left no status, and the others waited in vain: look there first",
        ),
        (
            {2: {"final": False, "unix_time_s": 1.0}, 0: {"ended": "RuntimeError: x"}},
            "rank 2 ended without a last word: by SIGKILL (out of memory, say), SIGSEGV, SIGABRT or os._exit",
        ),
        (
            {1: {"unix_time_s": 1.0}, 0: {"ended": "RuntimeError: Connection closed by peer"}},
            "rank 1 ended before the others, without an exception",
        ),
        ({rank: {"ended": "SIGTERM"} for rank in range(4)}, "all ranks arrive on time"),
        (
            {2: {"ended": "KeyboardInterrupt (train.py:7)", "unix_time_s": 1.0}, 0: {"ended": "RuntimeError: x"}},
            "all ranks arrive on time",
        ),
    ],
)
def test_a_job_that_broke_off_is_told_from_its_end(ends: dict[int, dict[str, Any] | None], says: str) -> None:
    """By who raised first, or left without a word; and then nobody is said to arrive on time."""
    ran = [(s | {"final": True}, ends.get(s["rank"], {})) for s in run(SHAPES["ddp"](4), 4, iterations=160)]
    snapshots = [snapshot | end for snapshot, end in ran if end is not None]
    found = find(snapshots)
    broke_off = bool(ends) and "on time" not in says
    assert found["text"][0].startswith(says)
    assert ("on time" in page(found)) != broke_off
    assert in_short(snapshots)["ended"] == broke_off
    lost = "without a last word" in says or ("Connection" in str(ends) and "ended before" not in says)
    assert ("to restart all ranks" in page(found)) == lost, "elsewhere the same would come again"
    assert "not ended when this was written" not in summarise(snapshots)
    running = summarise([*snapshots[:-1], snapshots[-1] | {"final": False}])
    assert running.endswith("\n\nnot ended when this was written: rank 3\n") == (not ends)
    heading = " ".join(summarise(snapshots).split(" of them on ")[1].split("\nmode ")[0].split())
    assert (says in heading) == broke_off
    interrupted = "rank 2 was interrupted: KeyboardInterrupt (train.py:7), after 160 iterations; after it, rank 0"
    assert (interrupted in page(found)) == (interrupted in heading) == ("KeyboardInterrupt" in str(ends))


def test_who_waited_in_a_hang_that_its_user_ended_was_killed_by_the_launcher() -> None:
    """In C++ no interrupt is heard; and where ranks stand at different places each place is told."""
    hung = counted("ddp", {0: (6,), 1: (7,), 2: (6,), 3: (7,)}, {})
    at = [one | {"at": f"train.py:{50 + one['rank'] % 3}"} for one in hung]
    acts = (
        "save or are in different collectives; rank 0 is at train.py:50; rank 2 is at train.py:52; py-spy dump --pid 70"
    )
    assert f"{acts} on node0 shows where the first one stands" in find(at)["text"][0]
    end = {"final": True, "ended": "KeyboardInterrupt (train.py:52)", "unix_time_s": 4e9 - 30.0}
    said = page(find([one | (end if one["rank"] == 2 else {"gone": True, "unix_time_s": 4e9}) for one in at]))
    assert "after 64 iterations; ranks 0-1, 3 did not end by it and were killed" in said
    assert "rank 0 was at train.py:50; rank 2 was at train.py:52" in said
    ends = {rank: {"final": True, "ended": "RuntimeError: Timed out" if rank % 2 else "SIGTERM"} for rank in range(4)}
    assert "look there first" not in page(find([one | ends[one["rank"]] for one in at])), "the awaited ones are known"
    assert "without a last word" not in said
    assert "to restart" not in said
    never = [one | {"iterations": 0, "still_s": 12.0, "gone": True, "step": {}} for one in at]
    assert "the job ended before its first step; rank 0 was at train.py:50; rank 2 was at" in page(find(never))
    assert "to restart" not in page(find(never))


Started = Mapping[int, tuple[int | None, ...]]


def counted(shape: str, started: Started, changed: dict[str, Any]) -> list[dict[str, Any]]:
    """The snapshots of a job that stands still, with what each rank started, in all groups or in each."""
    snapshots = run(SHAPES[shape](4), 4, iterations=64)
    for one in snapshots:
        rank = one["rank"]
        numbers = started[rank] * len(one["groups"]) if len(started[rank]) == 1 else started[rank]
        groups = zip(one["groups"].values(), numbers, strict=True)
        one["groups"] = {str(k): group | {"started": n} for k, (group, n) in zip(one["groups"], groups, strict=True)}
        one |= {"still_s": 40.0, "locality": {"device": "cpu", "process": f"boot ns {70 + rank}"}} | changed
    return snapshots


TWO_BY_TWO = {0: (5, 3), 1: (4, 3), 2: (5, 4), 3: (5, 4)}
"""What ranks in pairs started, with their neighbour and with every second rank: 0 and 3 wait for 1, and 2 for 0."""


@pytest.mark.parametrize(
    ("shape", "started", "changed", "says"),
    [
        (
            "ddp",
            {0: (7,), 1: (6,), 2: (7,), 3: (7,)},
            {},
            "rank 1 has not started the collective that ranks 0, 2-3 wait in",
        ),
        (
            "ddp",
            {0: (7,), 1: (6,), 2: (6,), 3: (6,)},
            {},
            "ranks 1-3 have not started the collective that rank 0 waits in",
        ),
        ("ddp", {0: (7,), 1: (7,), 2: (7,), 3: (7,)}, {}, ""),
        ("ddp", {0: (7,), 1: (6,), 2: (None,), 3: (7,)}, {}, ""),
        ("ddp", {0: (7,), 1: (6,), 2: (7,), 3: (7,)}, {"locality": {"device": "cuda:0"}}, ""),
        ("ddp", {0: (7,), 1: (6,), 2: (7,), 3: (7,)}, {"world_size": 5}, ""),
        ("tensor and data", TWO_BY_TWO, {}, "rank 1 has not started the collective that ranks 0, 3 wait in"),
        ("tensor and data", {0: (5, 3), 1: (4, 4), 2: (4, 4), 3: (5, 3)}, {}, ""),  # in a circle
    ],
)
def test_a_rank_that_others_hang_for_is_named_by_what_groups_count(
    shape: str, started: Started, changed: dict[str, Any], says: str
) -> None:
    snapshots = counted(shape, started, changed)
    said = find(snapshots)["text"][0]
    many = "they hang, evaluate, save or are in different collectives"
    acts = many if says.startswith("ranks") else "it hangs, evaluates or saves"
    named = f"{says}: {acts}; py-spy dump --pid 71 on node0 shows where "
    assert said.startswith(named if says else "no step has ended for 40 s")
    assert "no step has ended for 40 s; the longest before took " in said
    assert "on time" not in page(find(snapshots)), "until then, perhaps"
    assert verdict(find(snapshots), 1) != "on time" or not says
    soon = [one | {"still_s": 12.0, "at": "train.py:61, augment"} for one in snapshots]
    for end in ({"final": True, "ended": "SIGTERM"}, {"final": True, "ended": "KeyboardInterrupt"}, {"gone": True}):
        ended = find([one | end for one in soon])["text"][0]
        who = f"{says[:9]} were" if says.startswith("ranks") else "rank 1 was"
        at = f"the last step ended 12 s before the job did; {who} at train.py:61, augment"
        assert ended.endswith(f"in; {at}") == bool(says), "an evaluation of 12 s is none where nobody waits"
    raised = [one | {"final": True, "ended": "ValueError", "unix_time_s": 4e9 - (one["rank"] == 1)} for one in soon]
    assert find(raised)["text"][0].startswith("rank 1 raised ValueError")
    earlier = [one | {"final": True, "ended": "SIGTERM", "unix_time_s": 4e9 - 9.0 * one["rank"]} for one in soon]
    assert "the last step ended" not in page(find(earlier)), "statuses of different moments"
    for end, otherwise in (("SIGTERM", "the last step ended 40 s before"), ("RuntimeError: x", "rank 0 raised Runt")):
        ended = find([one | {"final": True, "ended": end} for one in snapshots])["text"][0]
        assert ended.startswith(otherwise) != ("had not started the collective that" in ended)
        assert ended.startswith(otherwise) != bool(says)


def test_a_rank_that_may_have_gone_on_is_named_only_where_no_other_rank_is_behind() -> None:
    def behind(shape: str, started: Started, old: set[int]) -> tuple[list[int], list[int]]:
        return Job(counted(shape, started, {})).held_up(old)

    assert behind("ddp", {0: (7,), 1: (2,), 2: (7,), 3: (7,)}, {1}) == ([1], [0, 2, 3])
    assert behind("ddp", {0: (7,), 1: (2,), 2: (6,), 3: (7,)}, {1}) == ([2], [0, 3])
    assert behind("ddp", {0: (7,), 1: (2,), 2: (4,), 3: (7,)}, {1, 2}) == ([1, 2], [0, 3])
    assert behind("tensor and data", TWO_BY_TWO | {1: (1, 1)}, {1}) == ([1], [0, 3])
    early = counted("ddp", {0: (7,), 1: (6,), 2: (7,), 3: (7,)}, {})
    early[1]["iterations"] = 0
    assert Job(early).held_up() == ([], []), "it counts from another place"


# The page of a run


def test_the_page_says_where_the_step_went_and_what_pacing_did() -> None:
    slow = {"compute_s": 0.09, "collective_s": 0.0, "barrier_s": 0.008, "pacing_s": 0.002}
    alone = {"stopped": {"count": 1, "total_s": 60.0, "own_s": 59.0, "longest_s": 60.0, "unix_time_s": 1.7e9}}
    said = summarise([snapshot(0), snapshot(1, parts=slow, **alone)])
    early = summarise([snapshot(0, iterations=40, regular=38, irregular=9)])
    assert "left out, whose" not in early, "the first ones, which were measured later"
    assert ", 9 left out, whose" in summarise([snapshot(0, iterations=40, regular=31, irregular=9)])
    heading = "job job, attempt 20261123T053000-3f2a91, 4 ranks; this page is from 2 of them on 1 host"
    assert heading in " ".join(said.split())
    for line in (
        "mean 100 ms, median 99 ms, 99th percentile 140 ms, at best 95 ms; CV 4.0 %",
        "compute and everything else     80 ms   80.0 %   from 70 ms (rank 0) to 90 ms (rank 1)",
        "in the barrier                   8 ms    8.0 %\n",
        "1,180 delays taken of 1,200 asked for, 2.4 s in all iterations of all ranks, longest 10 ms",
        "blocks with and without, on rank 0: helps by 8.1 % [7.2, 9.0]",
        "the agent itself took 20 µs of host time per iteration, 0.02 % of the step",
    ):
        assert line in said
    assert "; with them the mean is 150 ms" in " ".join(said.split())
    stops = "steps of over 20 times the median took 33.5 % of the time, the longest 60 s; the others waited in them for"
    assert f"{stops} rank 1, 59 s each" in " ".join(said.split())


def test_a_page_stays_a_page_with_many_ranks() -> None:
    toy = run(SHAPES["ddp"](200), 200, slow_s=[0.01 * (rank % 7 == 0) for rank in range(200)], iterations=32)
    events = [[{"unix_time_s": 1.7e9 + rank, "text": f"number {rank} of many " * 10}] for rank in range(200)]
    places = [{"host": f"node{rank // 8}"} for rank in range(200)]
    ranks = [toy[r] | snapshot(r, world_size=200, events=events[r]) | places[r] for r in range(200)]
    lines = summarise(ranks).splitlines()
    assert len(lines) < 80
    assert max(map(len, lines)) <= WIDTH


def test_the_page_is_written_with_what_the_others_wrote(tmp_path: Path) -> None:
    for rank in range(1, 4):
        write_status(tmp_path, snapshot(rank))
    written, _ = write_summary(tmp_path, snapshot(0))
    assert "this page is from 4 of them on 2 hosts" in " ".join(written.split())
    for folder in (tmp_path, tmp_path / ATTEMPT):
        assert (folder / SUMMARY).read_text() == written


@given(st.dictionaries(st.sampled_from(sorted(set(snapshot()) - {"rank", "attempt"})), JSON, max_size=6))
def test_no_snapshot_breaks_the_page(changed: dict[str, Any]) -> None:
    said = summarise([snapshot(0, **changed), snapshot(1)])
    assert "Where the step went" in said
    assert "\x1b" not in said
