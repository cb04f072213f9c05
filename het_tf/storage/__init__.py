"""Rows in files: checkpoints, Keras files, served models."""
