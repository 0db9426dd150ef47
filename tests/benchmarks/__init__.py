"""Benchmarks: what the outbox costs, as ratios measured side by side in one run.

`python -m tests.benchmarks` starts private servers, measures, and prints a table; see
docs/benchmarks.md. Nothing here is a test: a ratio that missed its target is printed, not raised.
"""
