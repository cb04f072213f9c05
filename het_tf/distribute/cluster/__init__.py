"""Clusters: TF_CONFIG, server processes, and GPUs."""
