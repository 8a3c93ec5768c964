"""The named configurations shipped with paceenv: YAML files, one directory per kind, and no code."""
