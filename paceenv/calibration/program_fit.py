"""What only a simulated step shows of a program: how phases vary, and rates that no transfer shows.

A rate is put so that the simulated step is as long as the measured one.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Final

from paceenv.calibration.cluster_builder import ClusterBuilder, Matched
from paceenv.calibration.compute_noise import put_lengths
from paceenv.calibration.known_program import AnchorStamps
from paceenv.calibration.parameters import FROM_BASE, identified, not_identifiable
from paceenv.calibration.program_links import NONE_ALONE, SETTLES
from paceenv.calibration.program_stamps import ProgramStamps

CLOSE: Final = 0.01
"""Error of the simulated mean step from which on single phases may vary by themselves."""
RATE: Final = "fabric.nic_gbps"


def match_program(builder: ClusterBuilder[ProgramStamps]) -> None:
    """Lengths of phases, and rates that nobody knows and none shows, so that the step takes as long as measured."""
    was, kept = abs(builder.mean_error), (deepcopy(builder.data), list(builder.parameters))
    if was > CLOSE:
        put_lengths(builder)
        if abs(builder.mean_error) >= was:
            builder.data, builder.parameters = kept
    matched = builder.match_step(builder.unseen, 0.5, 8.0) if builder.unseen else ""
    if isinstance(matched, Matched):
        builder.drop(builder.unseen)
        said = f"put so that the step takes as long as measured; {SETTLES}"
        builder.put(*(not_identifiable(key, gbps, NONE_ALONE, said) for key, gbps in matched.gbps.items()))


def match_known(builder: ClusterBuilder[AnchorStamps]) -> None:
    """Lengths of a given program's phases, and the rate of the NICs."""
    put_lengths(builder)
    matched = builder.match_step([RATE], 0.3, 2.0)
    if isinstance(matched, Matched):
        said = "the rate with which the simulated step is as long as the measured one; latency is in it"
        builder.put(identified(RATE, matched.gbps[RATE], matched.gbps[RATE] * matched.relative_se, said))
    else:
        builder.add(not_identifiable(RATE, builder.data["fabric"]["nic_gbps"], matched, FROM_BASE))
