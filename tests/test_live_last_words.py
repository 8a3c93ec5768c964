"""SIGTERM: the last status and segment are there, and the process ends as it does without the agent."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
START_S = 120.0
TRAIN = """
    import os, signal, sys, time, torch
    {before}
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(50):
        model(torch.randn(2, 4)).sum().backward()
        optimizer.step()
    {after}
    print("READY", flush=True)
    {then}
"""
WAITS = "while True: time.sleep(0.01)"
BLOCKED = "import ctypes; ctypes.CDLL(None).sleep(60)"
"""In C code without the interpreter, as in a collective: Python runs no handler of a signal meanwhile."""
HANDLER = "signal.signal(signal.SIGTERM, lambda *_: (print('theirs', flush=True), os._exit(7)))"
STUCK = "import ctypes; c, m = ctypes.CDLL(None), bytes(64); c.pthread_mutex_lock(m); c.pthread_mutex_lock(m)"
"""The same where not even a signal that has a handler interrupts it."""
CASES = {"blocked": ("", "", BLOCKED, -signal.SIGTERM, ""), "own handler before": (HANDLER, "", WAITS, 7, "theirs\n")}


ASYNC = """
    import asyncio, socket
    async def main(): asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, print)
    asyncio.run(main())
    ends = time.monotonic() + 3.0
    while time.monotonic() < ends:
        optimizer.step()
        time.sleep(0.01)
"""


def start(folder: Path, before: str, after: str, then: str) -> subprocess.Popen[str]:
    script = folder / "train.py"
    script.write_text(textwrap.dedent(TRAIN.format(before=before, after=after, then=then)))
    command = [sys.executable, "-m", "paceenv.live", "--out", "run", str(script)]
    environ = os.environ | {"PYTHONPATH": str(TESTS.parent), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, cwd=folder, env=environ, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "READY\n"
    return process


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_process_ends_as_ever_and_leaves_its_last_status(case: str, tmp_path: Path) -> None:
    before, after, then, code, printed = CASES[case]
    process = start(tmp_path, before, after, then)
    begin_s = time.monotonic()
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=START_S)
    took_s = time.monotonic() - begin_s
    assert (process.returncode, output) == (code, printed)
    assert took_s < 1.5
    if case == "blocked":
        (path,) = (tmp_path / "run").rglob("rank00000.json")
        status = json.loads(path.read_text())
        assert status["final"]
        assert status["iterations"] == 50
        assert re.fullmatch(r"train\.py:\d+, <module>", status["at"])
        assert any("SIGTERM" in event["text"] for event in status["events"])


@pytest.mark.slow
def test_children_of_the_job_do_not_end_it(tmp_path: Path) -> None:
    children = """
    import subprocess
    from multiprocessing import get_context
    handlers = []
    for _ in range(20):
        child = os.fork()
        if not child:
            time.sleep(5)
            os._exit(0)
        os.kill(child, signal.SIGTERM)
        handlers.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    worker = get_context("fork").Process(target=time.sleep, args=(9,))
    worker.start()
    worker.terminate()
    worker.join()
    outside = subprocess.Popen(["sleep", "9"])
    outside.terminate()
    print(set(handlers), worker.exitcode, outside.wait(), flush=True)
    """
    then = textwrap.dedent(children).strip().replace("\n", "\n    ")
    process = start(tmp_path, "", "", then)
    output, _ = process.communicate(timeout=START_S)
    assert (process.returncode, output) == (0, "{-15} -15 -15\n")


@pytest.mark.slow
def test_sigterm_ends_a_blocked_rank_whose_script_took_the_descriptor(tmp_path: Path) -> None:
    after = textwrap.dedent(ASYNC).strip().replace("\n", "\n    ")
    with start(tmp_path, "", after, STUCK) as process:
        time.sleep(0.5)
        process.send_signal(signal.SIGTERM)
        try:
            process.communicate(timeout=10.0)
        finally:
            process.kill()
    assert process.returncode == -signal.SIGTERM
