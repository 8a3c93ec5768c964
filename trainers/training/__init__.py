"""``paceenv train``: PPO of Stable-Baselines3 on the simulated clusters."""
