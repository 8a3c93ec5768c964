"""The slow, obvious simulator: every message of every collective is a flow of its own. The fast engine's referee.

What it does not know it refuses (``setup``). Where the two part, and why:

- a ring's early members work ahead of a late one in the first bucket, which the fast engine does not count; at most
  about half of that bucket's time, and all of the payload where it goes in one bucket;
- for ``placement: spread`` the fast engine takes the expected number of hops between leaves, here nodes are shuffled:
  for small groups the two differ by tens of per cent; compare with packed placement or one node per leaf;
- in a lossy all-to-all the senders' ports prolong messages and so add to the incast; the fast engine knows the
  receivers' ports only;
- payloads about as large as the first bucket (1 MiB) go in one bucket, so that working ahead is all there is to see;
- a tree passes its payload on in 16 pieces, and filling it with the first ones costs up to 0.8 % of a step;
- with two tenants that fill the upper tier, or under a rule with a threshold, small differences grow from step to step.
"""

from paceenv.sim.reference.message_job import Reference, run
from paceenv.sim.reference.seeds import References, check_size
from paceenv.sim.reference.setup import Setup

__all__ = ["Reference", "References", "Setup", "check_size", "run"]
