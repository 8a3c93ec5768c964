"""The top floor: training with Stable-Baselines3, evaluation, the score table, the demo."""
