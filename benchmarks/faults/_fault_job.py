"""The training script: one rank of a job with a fault."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from pathlib import Path


def main() -> None:
    """Arguments: kind, variant, seed, folder, and how the agent is attached ("", launcher or attach)."""
    from benchmarks.faults._fault import FAULTS, Job

    kind, variant, seed, folder, agent = sys.argv[1:]
    for name in ("system", "process", "python", "torch"):
        import_module(f"benchmarks.faults._{name}_faults")
    job = Job(variant, int(seed), Path(folder), agent=agent)
    os.chdir(folder)
    FAULTS[kind].act(job)


if __name__ == "__main__":
    main()
