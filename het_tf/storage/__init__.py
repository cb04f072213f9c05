"""Rows in files: checkpoints, Keras files, and models for serving."""
