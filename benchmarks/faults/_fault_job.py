"""The training script: one rank of a job with a fault."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from benchmarks.faults import _process_faults, _system_faults, _torch_faults  # noqa: F401  # they register
from benchmarks.faults._fault import FAULTS, Job

if __name__ == "__main__":
    kind, variant, seed, folder, agent = sys.argv[1:]  # agent: "", launcher or attach
    os.chdir(folder)
    FAULTS[kind].act(Job(variant, int(seed), Path(folder), agent=agent))
