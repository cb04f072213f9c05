"""Input of `fit`, `evaluate` and `predict`: datasets, batches and how they reach workers."""
