"""The slow, obvious simulator: every message of every collective is a flow of its own. It checks the fast engine.

It refuses physics that it does not support (``setup``). The two engines differ in these points:

- Early members of a ring work ahead of a late one in the first bucket. The fast engine does not count that. It is at
  most about half of that bucket's time, and all of the payload where it goes in one bucket.
- For ``placement: spread`` the fast engine takes the expected number of hops between leaves; here nodes are shuffled.
  For small groups the two differ by tens of per cent; compare with packed placement or one node per leaf.
- In a lossy all-to-all the senders' ports prolong messages and so add to the incast. The fast engine models only the
  receivers' ports.
- Payloads about as large as the first bucket (1 MiB) go in one bucket, so working ahead is all there is to see.
- A tree passes its payload on in 16 pieces, and filling it with the first ones costs up to 0.8 % of a step.
- In a program pairs of an all-to-all exchange what they have before the last member is there. The fast engine starts it
  with its last member, which is up to 11 % of a step longer on an oversubscribed tier, and nothing behind free NICs.
- Messages of one collective between near nodes are through before those between far ones. The fast engine keeps their
  proportion to the end: up to 2.5 % where another collective waits for the NICs of the near ones.
- With two tenants that fill the upper tier, or under a rule with a threshold, small differences grow from step to step.
"""

from paceenv.sim.reference.message_steps import Reference, References, check_size, run
from paceenv.sim.reference.program_steps import ProgramReference
from paceenv.sim.reference.setup import Setup

__all__ = ["ProgramReference", "Reference", "References", "Setup", "check_size", "run"]
