"""The agent for trainers of other libraries, a module each; nothing here is imported before it is asked for."""
