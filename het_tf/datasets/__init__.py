"""Data sets for examples, tests and benchmarks: real ones where they are available."""
