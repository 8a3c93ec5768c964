"""Registers the environments with Gymnasium, which since its version 1.0 has no plugin entry points of its own."""

from __future__ import annotations

from typing import Any

import gymnasium

ENV_ID = "paceenv/Pacing-v0"
SCENARIOS: dict[str, dict[str, Any]] = {
    "TwoJobs": {"cluster": "two-jobs", "mechanisms": "phase_shift"},
    "UnequalSlack": {"cluster": "unequal-slack", "mechanisms": "slack"},
    "Incast": {"cluster": "incast-shallow", "mechanisms": "stagger"},
    "Null": {"cluster": "null-jitter", "mechanisms": "slack"},
}
"""Arguments of ``paceenv/NAME-v0`` beside those of :data:`ENV_ID`: three jobs on which pacing pays, with the mechanism
that does it, and one on which nothing can."""


def register_envs() -> None:
    """Register the environments, once; cheap, as the engine is imported only when one is made."""
    for name, arguments in {ENV_ID: {}, **{f"paceenv/{name}-v0": given for name, given in SCENARIOS.items()}}.items():
        if name not in gymnasium.registry:
            gymnasium.register(
                id=name,
                entry_point="paceenv.envs.pacing_env:PacingEnv",
                vector_entry_point="paceenv.envs.pacing_env:PacingVectorEnv",
                kwargs=arguments,
            )


register_envs()
