"""Checkpoints that parameter servers write and read: snapshots, increments, and the manager."""
