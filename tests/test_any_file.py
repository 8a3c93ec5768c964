"""Whatever a file holds it is read, diagnosed and shown, or refused in one line: every format, damaged at random."""

from __future__ import annotations

import copy
import gzip
import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import log_samples
import numpy as np
import pytest
from gpu_profiles import Job, Kernel, Meeting, profiles
from hung_jobs import data_parallel
from hypothesis import given
from hypothesis import strategies as st
from importer_samples import profile_of

from paceenv.core.errors import InputError
from paceenv.core.plain import plain
from paceenv.diagnosis.answer import find_answer
from paceenv.diagnosis.verdict import conclude
from paceenv.importers.inputs import Inputs, read_inputs
from paceenv.report.answer_sections import answer_sections

PROGRAM: list[Kernel | Meeting] = [Kernel(300.0), Meeting("all_to_all"), Kernel(90.0), Meeting(beside=True)]
STEP_S = 1.0 + 0.05 * np.random.default_rng(3).normal(size=64)
EVENTS = b'{"traceEvents": ['
BEGINS = (b"", EVENTS, b'{"entries": [', EVENTS + b'{"a":' * 3000, b"\x80\x02", b"\x1f\x8b\x08\0")
ODD = (
    *(None, -1, 0, 1 << 70, 1e308, -1e308, 10**400, 1.5, 1e300, True, float("nan"), "x", "7", [], {}, [[]], ["x"]),
    *({"a": 1}, ("0", 1), "kernel", "nccl:all_reduce", "gloo:all_reduce", "ProfilerStep#11", "cuda_runtime", "cpu_op"),
)


def documents(name: str, random: Random) -> list[Any]:
    """What two files of a format hold, before any damage."""
    if name == "profiles":
        how = {key: random.random() < 0.5 for key in ("metadata", "launches", "marks")}
        return profiles(Job(2, range(10, 15), lambda _: PROGRAM, **how))
    return {
        "overlapping profiles": [profile_of(rank) for rank in range(2)],
        "dumps of a hang": [data_parallel(2, steps=1, host_stops={1: 1}).run().dump(rank) for rank in range(2)],
    }[name]


def containers(value: Any) -> Iterator[Any]:
    """Everything within a document that holds something."""
    if isinstance(value, dict | list) and value:
        yield value
        for inner in value.values() if isinstance(value, dict) else value:
            yield from containers(inner)


def damaged(document: Any, random: Random) -> Any:
    """The document with some of its values odd, missing, or there twice."""
    document = copy.deepcopy(document)
    for _ in range(random.randrange(6)):
        place = random.choice([*containers(document)] or [{0: 0}])
        key = random.choice([*place] if isinstance(place, dict) else range(len(place)))
        if isinstance(place, list) and random.random() < 0.3:
            place.insert(0, copy.deepcopy(place[key]))
        elif random.random() < 0.7:
            place[key] = copy.deepcopy(random.choice(ODD))
        else:
            del place[key]
    return document


def content(name: str, random: Random) -> list[bytes]:
    """The bytes of some files."""
    if name == "bytes":
        return [random.choice(BEGINS) + random.randbytes(random.randrange(400))]
    if name == "logs":
        return [random.choice([*log_samples.LOGS.values()])(STEP_S).encode()]
    made = [damaged(document, random) for document in documents(name, random)]
    if name.startswith("dumps") and (protocol := random.randint(1, 5)) > 1:
        return [pickle.dumps(document, protocol) for document in made]
    return [json.dumps(document).encode() for document in made]


def check(inputs: Inputs) -> None:
    """What was read is sound."""
    if inputs.trace is not None:
        assert (inputs.trace.column("end_s") >= inputs.trace.column("start_s")).all()
    for one in inputs.activity:
        parts = [one.compute_s, one.to_device_s, one.other_copies_s, one.exposed_s, one.host_wait_s, one.idle_s]
        assert min(np.nan_to_num([*parts, one.hidden_s, one.loader_s])) >= -1e-9
        assert np.nansum(parts) == pytest.approx(one.end_s - one.start_s, rel=1e-3, abs=1e-6)
    for log in inputs.steps:
        assert len(log.step_V) == len(log.step_s_V) == len(log.steps_V) == len(log.run_V) >= 4
        assert (np.isfinite(log.step_s_V) & (log.step_s_V > 0.0)).all()


@pytest.mark.parametrize("name", ["bytes", "logs", "profiles", "overlapping profiles", "dumps of a hang"])
@given(seed=st.integers(0, 1 << 32))
def test_whatever_a_file_holds_it_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, name: str, seed: int
) -> None:
    folder, random = tmp_path_factory.mktemp("files"), Random(seed)
    for rank, whole in enumerate(content(name, random)):
        at, new = random.randrange(4000), random.randbytes(random.randrange(8))
        torn = whole[:at] + new + whole[at + random.randrange(60) :] if random.random() < 0.4 else whole
        packed = gzip.compress(torn)[: random.randrange(40, 9000)] if random.random() < 0.4 else torn
        Path(folder, f"rank_{rank}").write_bytes(packed)
    refused = ""
    try:
        inputs = read_inputs([folder])
        check(inputs)
        answer = find_answer(inputs)
        json.dumps(plain(answer), allow_nan=False)
        verdict = conclude(answer.diagnosis) if answer.diagnosis is not None else None
        assert answer_sections(answer, verdict, inputs.activity, "files")
    except InputError as error:
        refused = str(error)
    assert "\n" not in refused
