"""Fuzzes the importers under coverage guidance (atheris): whatever a file holds, it is a trace or an InputError.

``make fuzz`` runs it for five minutes; ``FUZZ_S=3600 make fuzz`` for an hour. Another exception, or an input that takes
20 s or 2 GB, ends the run, and the input that did it is left in ``runs/fuzz``. What is read goes on into the diagnosis,
as a user's file does.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import pickle
import sys
import tempfile
import warnings
from pathlib import Path

import atheris
import log_samples
import numpy as np
from gpu_profiles import Job, Kernel, Meeting, profiles
from hung_jobs import data_parallel
from importer_samples import TABLE, dump_of, profile_of
from inspector_logs import log_of

with atheris.instrument_imports(
    include=["paceenv.importers", "paceenv.calibration.fits.bandwidth", "paceenv.core.trace"]
):
    from paceenv.calibration.fits.bandwidth import fit_bandwidth
    from paceenv.importers.inputs import read_inputs
    from paceenv.importers.nccl_tests import read_tables
    from paceenv.importers.step_log import read_step_log

from paceenv.core.errors import InputError
from paceenv.diagnosis.answer import find_answer
from paceenv.diagnosis.step_times.step_diagnosis import diagnose_steps

BENCHMARK = "0 data size: 4.0 GB\n1 data size: 4.0 GB\n" + "0:\n duration: 0.7 sec\n1:\n duration: 0.7 sec\n" * 3
MOST_STEPS = 6
"""Of the samples: mutations reach more of a small file."""


def samples() -> dict[str, bytes]:
    """A small file of every format but Parquet, whose reader is pyarrow's."""
    profile = profile_of(0)
    profile["traceEvents"] = profile["traceEvents"][: 1 + 7 * MOST_STEPS]
    program = [Kernel(900.0), Meeting("all_to_all"), Kernel(90.0), Meeting(beside=True)]
    (gpu,) = profiles(Job(1, range(4), lambda _: program))
    del profile["distributedInfo"], gpu["distributedInfo"]  # a file's name says which rank it is
    dump = dump_of(0, 0.0, steps=MOST_STEPS)
    found = {"profile": profile, "gpu": gpu, "dump": dump}
    packed = {name: json.dumps(content).encode() for name, content in found.items()} | {"table": TABLE.encode()}
    packed |= {f"pickle{protocol}": pickle.dumps(dump, protocol) for protocol in (2, 4)}
    hung, seen = data_parallel(2, steps=2, host_stops={1: 2}).run(), log_of(0, 2, late={}, steps=4, verbose=True)
    packed |= {"hung": pickle.dumps(hung.dump(0), 2), "hung_json": json.dumps(hung.dump(0)).encode()}
    packed |= {"inspector": "\n".join(map(json.dumps, seen)).encode(), "benchmark": BENCHMARK.encode()}
    step_s = 1.0 + 0.05 * np.sin(np.arange(64.0))
    return packed | {f"log{i}": write(step_s).encode()[:8192] for i, write in enumerate(log_samples.LOGS.values())}


def take(content: bytes, paths: list[Path]) -> None:
    """One input, as the files of two ranks, as a log and as a table."""
    for path in paths:
        path.write_bytes(content)
    with contextlib.suppress(InputError):
        found = find_answer(read_inputs(paths))
        json.dumps(found.to_json())
        assert not any("\n" in late.text for late in found.late_hosts)
    with contextlib.suppress(InputError):
        diagnose_steps(read_step_log(paths[0])).to_json()
    with contextlib.suppress(InputError):
        for table in read_tables(paths[0]):
            fit_bandwidth(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=int, default=300)
    parser.add_argument("--out", type=Path, default=Path("runs/fuzz"))
    options = parser.parse_args()
    corpus = options.out / "corpus"
    corpus.mkdir(parents=True, exist_ok=True)
    for name, content in samples().items():
        (corpus / name).write_bytes(content)
    warnings.simplefilter("error")  # a user would see them
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        paths = [Path(folder, f"rank_{rank}") for rank in range(2)]
        limits = ["-timeout=20", "-rss_limit_mb=2048", "-max_len=16384", f"-max_total_time={options.seconds}"]
        atheris.Setup(
            [sys.argv[0], *limits, f"-artifact_prefix={options.out}/", "-print_final_stats=1", str(corpus)],
            lambda content: take(content, paths),
        )
        atheris.Fuzz()


if __name__ == "__main__":
    main()
