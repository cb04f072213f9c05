"""Embedding tables, the workers' caches of their rows, and the messages between the two."""
