"""Rows of models that are served: published versions and memory-mapped files."""
