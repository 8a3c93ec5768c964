"""The live side: what runs inside a training job.

So far the decision core of one rank (``live.pacer``): the simulator's own estimator, signals and rules, interpreted,
under a policy. Imports neither Numba, Gymnasium, Stable-Baselines3 nor Ray.
"""
