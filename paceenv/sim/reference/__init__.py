"""The referee: the model in plain Python, slow and obvious. Read it to know what is simulated.

Start with ``ranks`` (what a rank does in a step), then ``flows`` (how transfers share links) and ``referee`` (what
makes one step differ from the next, and what it leaves for the next: delays, heat, failures). The compiled engine must
come to the same times on the same draws.

Shared with the engine are noise, the pacing rules and the estimator (``paceenv.core``), all else that concerns a rank,
a node, a group or a tenant by itself, and what a cluster derives to: numbers of the job, what every rank does in a
step, and which links each transfer takes.
"""

from paceenv.sim.reference.referee import Reference

__all__ = ["Reference"]
