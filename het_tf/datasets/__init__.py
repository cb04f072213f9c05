"""Data sets that examples, tests and benchmarks train on: real where they can be had."""
