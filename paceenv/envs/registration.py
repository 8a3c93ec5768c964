"""Registers ``paceenv/Pacing-v0`` with Gymnasium, which since its version 1.0 has no plugin entry points of its own."""

from __future__ import annotations

import gymnasium

ENV_ID = "paceenv/Pacing-v0"


def register_envs() -> None:
    """Register the environments, once; cheap, as the engine is imported only when one is made."""
    if ENV_ID not in gymnasium.registry:
        gymnasium.register(
            id=ENV_ID,
            entry_point="paceenv.envs.pacing_env:PacingEnv",
            vector_entry_point="paceenv.envs.pacing_env:PacingVectorEnv",
        )


register_envs()
