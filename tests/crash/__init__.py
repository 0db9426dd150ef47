"""Relays that are killed, or cut off, at every point of a delivery; what is lost and what comes twice.

`python -m tests.crash` runs all of it on every broker and database; see docs/crash-matrix.md.
"""
