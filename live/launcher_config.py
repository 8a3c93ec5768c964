"""Settings from the command line of ``-m paceenv.live``; they override what the script gives ``live.attach``."""

from __future__ import annotations

from typing import Any

SETTINGS: dict[str, Any] = {}
"""Arguments of ``live.attach``, filled once by the launcher before the script starts; empty without it."""
