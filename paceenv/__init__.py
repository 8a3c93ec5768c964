"""paceenv: a reinforcement-learning testbed for tuning pacing in synchronous distributed training.

The package holds the contracts shared by the simulator and a live job (pacing rules, timing estimator, signals,
trace, metrics; numpy only) and, behind the extra ``sim``, the cluster model, the engine, calibration and the
Gymnasium environment. Nothing is imported here, so that ``import paceenv`` costs nothing on a production node.
"""

__version__ = "0.1.0"
