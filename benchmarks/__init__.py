"""Timings as ratios within one run: ``python -m benchmarks`` runs all, ``python -m benchmarks.speed.simulation`` one
of them.

Not part of the package and never asserted in a test; ``docs/evidence/benchmarks.md`` is what a run on one machine gave.
"""

import os

# One core is what is measured. These are read when numpy and torch are imported, which happens after this.
for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")
