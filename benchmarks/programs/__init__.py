"""Steps as programs: engines against each other, and against published jobs."""
