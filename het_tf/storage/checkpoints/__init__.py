"""Checkpoints that parameter servers write and read: snapshots, increments, their manager."""
