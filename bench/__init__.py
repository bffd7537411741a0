"""Benchmarks: seeded workloads, each compared with a reference, with results as JSON."""
