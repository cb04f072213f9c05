"""Rows of models for serving: published versions and memory-mapped files."""
