"""The Gymnasium environment and its checker."""
