"""Benchmarks: `make bench`, or `python -m benchmarks NAME` for one. Nothing here is a timed test."""
