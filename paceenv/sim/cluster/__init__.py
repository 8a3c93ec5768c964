"""What is simulated: the cluster config (job, fabric, noise, couplings) and the closed forms that feed the engine."""

from paceenv.sim.cluster.model import STAND_INS, Cluster, load_cluster

__all__ = ["STAND_INS", "Cluster", "load_cluster"]
