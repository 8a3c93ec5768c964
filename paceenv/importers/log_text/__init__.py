"""Text logs of training programs: lines without decorations, the known formats, and a user's own pattern."""
