"""Pacing policies: hand-written rules, the learned policy and its file, and the clairvoyant bound.

Importing this package imports nothing heavy; ``policies.base`` and ``policies.rules`` need only numpy, the policy file
also safetensors. ``policies.clairvoyant`` and ``policies.rollout`` import the engine and are imported by name.
"""
