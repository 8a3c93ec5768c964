"""Answers on what others recorded, held against the truth."""
