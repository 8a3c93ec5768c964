"""Policies on the Hugging Face Hub: a repository holds a policy file and its card."""
