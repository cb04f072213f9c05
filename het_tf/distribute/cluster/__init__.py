"""Clusters: TF_CONFIG, the processes of tasks, GPUs."""
