"""Input of `fit`, `evaluate` and `predict`: datasets, batches, and feeds for the workers."""
