"""Processes, threads and counters of a cluster. This package knows neither tables nor Keras."""
