"""Functions that a worker runs for `fit`, `evaluate` and `predict`."""
