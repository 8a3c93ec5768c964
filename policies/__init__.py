"""Pacing policies: hand-written rules, the learned policy and its file, and the clairvoyant bound.

Importing this package imports nothing heavy; ``paceenv.policies.base`` and ``paceenv.policies.rules`` need only numpy,
the policy file also safetensors. ``paceenv.policies.clairvoyant`` and ``paceenv.policies.rollout`` import the engine
and are imported by name.
"""

import os

# In a checkout this folder is reached through a link in paceenv/. Import its modules from where they really lie, so
# that breakpoints and tracebacks name the files that people open. Elsewhere this changes nothing.
__path__ = [os.path.realpath(folder) for folder in __path__]
