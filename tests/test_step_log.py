"""Text logs: every format as its program writes it, decorations, damage, and the user's own pattern."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import log_samples
import numpy as np
import pytest
from traced_jobs import JEAN_ZAY_DIR, needs_jean_zay

from paceenv.core.errors import InputError
from paceenv.importers.log_text.conversion import StepLog
from paceenv.importers.log_text.log_lines import stamp_in
from paceenv.importers.step_log import read_step_log

TRUE_S = 1.0 + 0.05 * np.random.default_rng(3).normal(size=640)
"""Step times behind every sample."""
INTERVALS = {"Megatron-LM": 10, "DeepSpeed": 10, "ms-swift": 5}
"""Steps that a value averages over, where it is not one."""
EVERY = {"DeepSpeed (samples/s)": 10, "nanoGPT": 10}
"""Steps between two values that are of one step each."""
CLOCK_ERROR_S = {"modded-nanogpt": 1.01e-3, "ms-swift": 2e-3, "time stamps": 1.01e-3, "torchtitan": 3e-3}
"""How far off a value may be that comes from a rounded clock or speed."""


def read(tmp_path: Path, text: str | bytes, pattern: str | None = None) -> StepLog:
    path = tmp_path / "log.txt"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_step_log(path, pattern=pattern)


@pytest.mark.parametrize("name", [n for n in log_samples.LOGS if not n.startswith("progress")])
def test_step_times_of_every_program(name: str, tmp_path: Path) -> None:
    log = read(tmp_path, log_samples.LOGS[name](TRUE_S))
    assert log.source.startswith((name.partition(" ")[0], "named columns"))
    width, every = INTERVALS.get(name, 1), EVERY.get(name, INTERVALS.get(name, 1))
    assert len(log.step_V) >= len(TRUE_S) // every - 1
    assert set(np.diff(log.step_V)) == {every}
    assert set(log.steps_V) == {width}
    assert set(log.run_V) == {0}
    first = 0 if int(log.step_V[-1]) in (len(TRUE_S) - EVERY.get(name, 1), len(TRUE_S) - 1) else 1  # number of a step
    means = [TRUE_S[end - width : end].mean() for end in log.step_V + 1 - first]
    np.testing.assert_allclose(log.step_s_V, means, atol=CLOCK_ERROR_S.get(name, 6e-4))


@pytest.mark.parametrize("batch_s", [0.5, 0.15])
def test_the_bar_of_the_training_wins_over_longer_ones_of_evaluations(batch_s: float, tmp_path: Path) -> None:
    evaluation = log_samples.bars(400, batch_s)
    log = read(tmp_path, log_samples.huggingface(evaluation, 400 * batch_s))
    assert (set(log.run_V), int(log.step_V[-1])) == ({0}, 1000)
    assert np.median(log.step_s_V) == pytest.approx(2.0)
    mean_s = np.average(log.step_s_V, weights=log.steps_V)
    assert mean_s == pytest.approx(2.0 + 4 * 400 * batch_s / 1000)  # no value of a single slow step
    assert "of progress bars of 1000, 400 steps that of 1000 is used" in log.notes


def test_a_bar_of_epochs_around_that_of_steps_is_none_of_steps(tmp_path: Path) -> None:
    inner, text = log_samples.bars(800, 0.5) + log_samples.bars(300, 0.5), ""
    for epoch in range(6):
        text += log_samples.bar(epoch, 6, epoch * 550.0, "Epochs: ") + inner
    log = read(tmp_path, text + log_samples.bar(6, 6, 3300.0, "Epochs: "))
    assert log.step_s_V == pytest.approx(0.5)
    assert (int(log.step_V.max()), int(log.run_V[-1])) == (800, 5)


@pytest.mark.parametrize(
    ("decorate", "rank"), [(log_samples.srun, 2), (log_samples.mpirun, 3), (log_samples.torchrun, 7)]
)
@pytest.mark.parametrize("name", ["Megatron-LM", "JSON lines"])
def test_tags_of_launchers(name: str, decorate: object, rank: int, tmp_path: Path) -> None:
    plain = read(tmp_path, log_samples.LOGS[name](TRUE_S))
    tagged = read(tmp_path, decorate(log_samples.LOGS[name](TRUE_S)))  # type: ignore[operator]
    np.testing.assert_array_equal(tagged.step_s_V, plain.step_s_V)
    assert tagged.rank == rank


@pytest.mark.parametrize("order", ["by rank", "by step"])
@pytest.mark.parametrize("kind", ["CSV", "JSON lines", "tagged JSON lines"])
def test_ranks_of_a_table_are_kept_apart(kind: str, order: str, tmp_path: Path) -> None:
    by_step = [(r, i, TRUE_S[i] * (1.4 if r == 3 else 1.0)) for i in range(100) for r in range(8)]
    rows = by_step if order == "by step" else sorted(by_step)
    if kind == "CSV":
        text = "rank,step,step_time\n" + "".join(f"{r},{i},{s}\n" for r, i, s in rows)
    elif kind == "JSON lines":
        text = "".join(json.dumps({"rank": r, "step": i, "step_time": s}) + "\n" for r, i, s in rows)
    else:
        text = "".join(f"{r}: {json.dumps({'step': i, 'step_time': s})}\n" for r, i, s in rows)
    log = read(tmp_path, text)
    assert (log.rank, [other.rank for other in log.others]) == (0, [1, 2, 3, 4, 5, 6, 7])
    assert log.notes[-1] == "lines of 8 ranks; those of rank 0 are shown, all are compared"
    for one in (log, *log.others):
        assert set(one.run_V) == {0}
        np.testing.assert_allclose(one.step_s_V, TRUE_S[:100] * (1.4 if one.rank == 3 else 1.0))


def test_of_the_runs_of_a_table_one_is_read_and_said(tmp_path: Path) -> None:
    rows = [(run, i, x * scale) for i, x in enumerate(TRUE_S[:100]) for run, scale in (("a", 1.0), ("b", 2.0))]
    rows += [("b", 100, 2.0)]
    log = read(tmp_path, "run,step,step_time\n" + "".join(f"{run},{i},{x}\n" for run, i, x in rows))
    np.testing.assert_allclose(log.step_s_V, [*(2.0 * TRUE_S[:100]), 2.0])
    assert log.notes[0] == "2 runs, by its column run; of them 'b' is looked at, as none has more rows"


@pytest.mark.parametrize("step_s_T", [TRUE_S, TRUE_S.round(1), np.full(20, 0.5)])
def test_a_column_time_that_does_not_grow_holds_step_times(step_s_T: np.ndarray, tmp_path: Path) -> None:
    log = read(tmp_path, "step,loss,time\n" + "".join(f"{i},2.5,{x}\n" for i, x in enumerate(step_s_T)))
    np.testing.assert_array_equal(log.step_s_V, step_s_T)
    assert set(log.run_V) == {0}
    assert "the times are read as step times, not as times since the start: they do not grow" in log.notes


def test_a_column_time_that_grows_is_a_clock_and_may_begin_anew(tmp_path: Path) -> None:
    rows = [(i, t) for _ in range(3) for i, t in enumerate(np.cumsum(TRUE_S))]
    log = read(tmp_path, "step,time\n" + "".join(f"{i},{t}\n" for i, t in rows))
    np.testing.assert_allclose(log.step_s_V, np.tile(TRUE_S[1:], 3))
    assert set(log.run_V) == {0, 1, 2}


@pytest.mark.parametrize("name", ["timestamp", "_timestamp", "created_at", "time"])
@pytest.mark.parametrize(("per_s", "digit_s"), [(1, 1.0), (10**9, 1e-9)])
def test_clocks_of_a_table_may_count_milliseconds_or_less(
    name: str, per_s: int, digit_s: float, tmp_path: Path
) -> None:
    ends_s = log_samples.START_S + np.cumsum(300.0 * TRUE_S[:50])
    rows = [{"step": i, "loss": 2.5, name: int(t * per_s)} for i, t in enumerate(ends_s)]
    log = read(tmp_path, "".join(json.dumps(row) + "\n" for row in rows))
    np.testing.assert_allclose(log.step_s_V, 300.0 * TRUE_S[1:50], atol=max(1.01 * digit_s, 1e-6))
    assert log.rounding_s == pytest.approx(digit_s)


@pytest.mark.parametrize("bad", ["-0.3", "nan", "-inf"])
@pytest.mark.parametrize(
    ("line", "pattern"),
    [
        ("step: {} time: {} s", None),
        ('{{"step": {}, "step_time_s": "{}"}}', None),
        ("{}={}", r"(?P<step>\d+)=(?P<s>.*)"),
    ],
)
def test_lines_whose_time_is_none_are_counted(line: str, pattern: str | None, bad: str, tmp_path: Path) -> None:
    def text(every: int) -> str:
        return "".join(line.format(i, bad if i % every == 0 else f"{x:.3f}") + "\n" for i, x in enumerate(TRUE_S))

    log = read(tmp_path, text(10), pattern)
    assert (len(log.step_V), log.notes[0]) == (576, "64 lines left out: the step time is negative or not finite")
    with pytest.raises(InputError, match=r"log\.txt: 0 step times, as 640 are negative or not finite; allowed: "):
        read(tmp_path, text(1), pattern)


def test_a_restart_begins_a_new_run(tmp_path: Path) -> None:
    text = log_samples.nanogpt(TRUE_S[:300], 1) + "Traceback (most recent call last):\n"
    text += "\n".join(log_samples.nanogpt(TRUE_S, 1).splitlines()[251:])
    log = read(tmp_path, text)
    assert [int((log.run_V == r).sum()) for r in (0, 1)] == [300, 390]
    assert int(log.step_V[300]) == 250


def test_gzip_and_a_cut_gzip(tmp_path: Path) -> None:
    packed = gzip.compress(log_samples.megatron(TRUE_S).encode())
    assert len(read(tmp_path, packed).step_V) == 64
    assert 4 <= len(read(tmp_path, packed[: len(packed) // 2]).step_V) < 64


def test_a_speed_without_time_stamps_is_none_of_steps(tmp_path: Path) -> None:
    text = "".join(line.partition("root - ")[2] + "\n" for line in log_samples.torchtitan(TRUE_S).splitlines())
    log = read(tmp_path, text)
    assert "how long a step takes cannot be told" in "; ".join(log.notes)
    assert (log.of, log.said(1e-4)) == ("token", "10,000 tokens/s")
    np.testing.assert_allclose(log.step_s_V / np.median(log.step_s_V), TRUE_S / np.median(TRUE_S), rtol=1e-3)


@pytest.mark.parametrize(
    ("line", "pattern"),
    [
        ("it={i} took {ms:.3f} millis", r"it=(?P<step>\d+) took (?P<ms>[\d.]+)"),
        ("n {i} {us:.0f}", r"n (?P<step>\d+) (?P<us>\d+)$"),
        ("== {s:.6f} ==", r"== (?P<s>[\d.]+)"),
        ("{i} speed {v:.6f}", r"(?P<step>\d+) speed (?P<steps_per_s>[\d.]+)"),
        ("{i} at {t:.6f}", r"(?P<step>\d+) at (?P<elapsed_s>[\d.]+)"),
        ("{stamp:.6f} n{i}", r"n(?P<step>\d+)"),
        ("n{i} when {stamp:.6f}", r"n(?P<step>\d+) when (?P<time>.*)"),
    ],
)
def test_the_users_own_pattern(line: str, pattern: str, tmp_path: Path) -> None:
    ends = np.cumsum(TRUE_S)
    text = "noise\n" + "\n".join(
        line.format(i=i, s=x, ms=1e3 * x, us=1e6 * x, v=1 / x, t=t, stamp=log_samples.START_S + t)
        for i, (x, t) in enumerate(zip(TRUE_S, ends, strict=True), 1)
    )
    log = read(tmp_path, text, pattern=pattern)
    assert log.source == "--pattern"
    np.testing.assert_allclose(log.step_s_V, TRUE_S[-len(log.step_s_V) :], atol=2e-6)
    assert len(log.step_s_V) >= len(TRUE_S) - 1


@pytest.mark.parametrize(
    ("texts", "values"),
    [
        (["1,512.5", "1,498", "987,", "2,001"], [1512.5, 1498, 987, 2001]),
        (["1,512,345", "1,234,567", "1.5", "1,234,567.5"], [1512345, 1234567, 1.5, 1234567.5]),
    ],
)
def test_commas_are_of_thousands(texts: list[str], values: list[float], tmp_path: Path) -> None:
    text = "".join(f"Step {i} took {x} us\n" for i, x in enumerate(texts))
    log = read(tmp_path, text, pattern=r"Step (?P<step>\d+) took (?P<us>[\d,.]+)")
    np.testing.assert_allclose(log.step_s_V, 1e-6 * np.array(values))
    with pytest.raises(InputError, match="matches too few lines"):
        read(tmp_path, text.replace(",", ",0"), pattern=r"Step (?P<step>\d+) took (?P<us>[\d,.]+)")


@pytest.mark.parametrize(
    ("text", "pattern", "message"),
    [
        *[
            (log_samples.nanogpt(TRUE_S), pattern, message)
            for pattern, message in (
                ("(", "no regular expression"),
                ("time (.*)", "no group; allowed: one of s, ms"),
                ("(?P<seconds>.*)", "group 'seconds' is unknown"),
                ("(?P<s>.)(?P<ms>.)", "groups ms, s; allowed: one of"),
                ("(?P<elapsed_s>.*)", r"without \(\?P<step>"),
                ("nothing like this (?P<s>[0-9])", "matches too few lines"),
            )
        ],
        ("", None, "unknown format"),
        ("hello\nworld\n", None, "unknown format; allowed: Parquet"),
        ("iter 1: loss 2, time 5.0ms\n", None, r"too few step times in it \(1 found, needed 4\)"),
        (b"PAR1....", None, "no text"),
        (b"\0\1\2\3" * 100, None, "no text"),
        ("step,step_time\r\n1,0.5\r\n".encode("utf-16"), None, "text in UTF-16; allowed: UTF-8"),
        ('{"log_history": [{"loss": 2.0, "step": 1}], "global_step": 1}', None, "too few step times in it;"),
        ("step,loss,step_time\n1,2,x\n", None, "too few step times in it;"),
    ],
)
def test_what_is_no_log_is_refused_in_one_line(
    text: str | bytes, pattern: str | None, message: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=message):
        read(tmp_path, text, pattern=pattern)


@pytest.mark.parametrize(
    ("text", "seconds", "digit"),
    [
        ("2025-06-04 08:51:48,074 - root", 1749027108.074, 1e-3),
        ("[2025/06/04 08:51:48] it", 1749027108.0, 1.0),
        ("2025-06-04T08:51:48.123456Z x", 1749027108.123456, 1e-6),
        ("2025-06-04T10:51:48+02:00 x", 1749027108.0, 1.0),
        ("1749027108.25 step", 1749027108.25, 1e-2),
        ("1749027108250 step", 1749027108.25, 1e-3),
        ("[1749027108.25] step", 1749027108.25, 1e-2),
        ("INFO:1749027108.25:root:step", 1749027108.25, 1e-2),
        ("step 3 wall_time=1749027108.25", 1749027108.25, 1e-2),
        ("step 3 'timestamp': 1749027108.25", 1749027108.25, 1e-2),
    ],
)
def test_time_stamps(text: str, seconds: float, digit: float) -> None:
    stamp = stamp_in(text)
    assert stamp is not None
    assert stamp.value == pytest.approx(seconds, abs=1e-6)
    assert stamp.digit == pytest.approx(digit)
    assert stamp_in("2025-13-44 99:00:00 x") is None


def test_counts_of_tokens_are_no_time_stamps(tmp_path: Path) -> None:
    lines = [f"step {i} | loss 3.0 | tokens {i * 1048576} | lr 1e-4" for i in range(955, 1200)]
    assert [stamp_in(line) for line in (*lines, "runtime 1749027108", "train_time:1749027108ms")] == [None] * 247
    with pytest.raises(InputError, match="unknown format"):
        read(tmp_path, "\n".join(lines))
    with pytest.raises(InputError, match="0 step times of at most a day"):
        read(tmp_path, "\n".join(line.replace("tokens", "clock") for line in lines))


@needs_jean_zay
def test_real_logs_of_jean_zay() -> None:
    found = {n: read_step_log(next(JEAN_ZAY_DIR.glob(f"*_n{n}_*.out"))) for n in (4, 8, 16)}
    assert {n: len(log.step_V) for n, log in found.items()} == {4: 20, 8: 20, 16: 9}
    assert all(set(log.steps_V) == {10} and log.source == "Megatron-LM" for log in found.values())
    assert found[4].step_s_V[0] == pytest.approx(2.1522)
    assert found[16].step_s_V[-1] == pytest.approx(2.739)
