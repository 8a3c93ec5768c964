"""The process that the ranks of a test job are forked from: PyTorch is imported once, a rank starts in milliseconds.

Reads one request per line on its standard input (``live_jobs`` writes them) and writes one event per line on its
standard output: ``{"pid": ...}`` in answer to a request, ``{"pid": ..., "exit_code": ...}`` when a rank has ended, the
code negative for a signal. A rank is a process like a script's: it ends through the interpreter's own shutdown, exit
handlers included. When the standard input closes, every rank is killed.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import importlib
import json
import os
import select
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

PRELOADED = (
    "numpy",
    "prometheus_client",
    "pyarrow.parquet",
    "safetensors.numpy",
    "torch._dynamo",
    "torch.distributed.algorithms.ddp_comm_hooks.default_hooks",
    "torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook",
    "torch.distributed.fsdp",
    "torch.nn.parallel",
)
"""What ranks use of other people's code. Nothing of ours: a rank imports that itself."""
PR_SET_PDEATHSIG = 1
_LET_GO_S = 0.05
_LIBC = ctypes.CDLL(None, use_errno=True)


def serve() -> dict[str, Any]:
    """Fork a rank for every request; returns in a rank only, with its request."""
    ranks: set[int] = set()
    pending = b""
    while True:
        if select.select([0], [], [], 0.01)[0]:
            data = os.read(0, 1 << 16)
            if not data:
                for pid in ranks:
                    os.kill(pid, signal.SIGKILL)
                os._exit(0)
            *lines, pending = (pending + data).split(b"\n")
            for line in lines:
                pid = os.fork()
                if not pid:
                    return dict(json.loads(line))
                ranks.add(pid)
                _tell(pid=pid)
        for pid in list(ranks):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                ranks.remove(pid)
                _tell(pid=pid, exit_code=os.waitstatus_to_exitcode(status))


def _tell(**event: int) -> None:
    os.write(1, json.dumps(event).encode() + b"\n")


def become_rank(request: dict[str, Any]) -> None:
    """Settle the new process: output, environment, and a report of its stacks should it hang."""
    _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.environ.update(request["environ"])
    sys.argv[:] = [request["body"]]
    faulthandler.enable()
    faulthandler.dump_traceback_later(request["stacks_after_s"])


def run(request: dict[str, Any]) -> None:
    """The training script of a rank: process group up, body, process group down, result to a file."""
    import torch.distributed as dist

    module, function = request["body"].split(":")
    body = getattr(importlib.import_module(module), function)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(
        request["backend"],
        init_method=f"file://{request['store']}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=request["timeout_s"]),
    )
    result = body(**request["parameters"])
    # Reducers must be gone before their process group, and a thread of gloo must not be the last to hold that.
    gc.collect()
    time.sleep(_LET_GO_S)
    dist.destroy_process_group()
    partial = Path(request["result"] + ".partial")
    partial.write_text(json.dumps(result))
    partial.rename(request["result"])


if __name__ == "__main__":
    for name in PRELOADED:
        importlib.import_module(name)
    gc.freeze()
    this = serve()
    become_rank(this)
    run(this)
