"""A folder for ``PYTHONPATH``: Python processes that the script starts run the one module in it at their start."""
