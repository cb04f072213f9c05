"""Embedding tables, the workers' caches of rows, and the messages between caches and tables."""
