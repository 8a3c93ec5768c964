"""Find out why a distributed PyTorch job is slow, and tune bounded delays (pacing) that fix it where they can.

The package holds the contracts shared by the simulator and a live job (pacing rules, timing estimator, signals,
trace, metrics; numpy only) and, behind the extra ``sim``, the cluster model, the engine, calibration and the
Gymnasium environment. Importing it costs nothing on a production node; where Gymnasium is already imported, it
registers ``paceenv/Pacing-v0``. ``import paceenv.envs`` registers it at any time.
"""

import sys

__version__ = "0.1.0"

if "gymnasium" in sys.modules:
    from paceenv.envs.registration import register_envs

    register_envs()
