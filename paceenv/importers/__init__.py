"""Other formats, converted to :mod:`paceenv.core.trace` or read as they are; ``inputs`` is the one way in."""
