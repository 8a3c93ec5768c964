"""The top floor: training with Stable-Baselines3, evaluation, the score table, the demo."""

import os

# In a checkout this folder is reached through a link in paceenv/. Import its modules from where they really lie, so
# that breakpoints and tracebacks name the files that people open. Elsewhere this changes nothing.
__path__ = [os.path.realpath(folder) for folder in __path__]
