"""What the command line of ``-m live`` asked for: it goes before what the script itself gives ``live.attach``."""

from __future__ import annotations

from typing import Any

SETTINGS: dict[str, Any] = {}
"""Arguments of ``live.attach``, filled once by the launcher before the script starts; empty without it."""
