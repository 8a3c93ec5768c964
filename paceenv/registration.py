"""Registers ``paceenv/Pacing-v0`` with Gymnasium; called by Gymnasium's own plugin entry point at its import."""

from __future__ import annotations


def register_envs() -> None:
    """Register the environments; cheap, as the engine is imported only when one is made."""
    import gymnasium

    if "paceenv/Pacing-v0" not in gymnasium.registry:
        gymnasium.register(
            id="paceenv/Pacing-v0",
            entry_point="paceenv.env:PacingEnv",
            vector_entry_point="paceenv.env:PacingVectorEnv",
        )
