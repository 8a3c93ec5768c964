"""The agent for trainers of other libraries, one module for each; none is imported before it is used."""
