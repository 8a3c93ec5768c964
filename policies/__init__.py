"""Pacing policies: hand-written rules, learned policies and their file, and policies that look ahead.

Importing this package imports nothing heavy; ``paceenv.policies.base`` and ``paceenv.policies.rules`` need only numpy,
the policy file also safetensors. ``clairvoyant``, ``rollout`` and ``select`` import the engine and are
imported by name.
"""

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceenv.policies.from_torch import save_network as save_network

# In a checkout this folder is reached through a link in paceenv/. Import its modules from where they really lie, so
# that breakpoints and tracebacks name the files that people open. Elsewhere this changes nothing.
__path__ = [os.path.realpath(folder) for folder in __path__]


def __getattr__(name: str) -> Any:
    """``save_network``, which needs the policy file and torch, only when it is asked for."""
    if name == "save_network":
        from paceenv.policies.from_torch import save_network

        return save_network
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
