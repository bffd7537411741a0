"""Benchmarks: seeded workloads, each beside a reference, with results as JSON."""
