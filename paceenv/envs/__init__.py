"""The Gymnasium environment; importing this package registers ``paceenv/Pacing-v0``."""

from paceenv.envs.registration import register_envs

__all__ = ["register_envs"]
