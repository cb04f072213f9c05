"""Processes, threads and counters of a cluster. This room knows neither tables nor Keras."""
