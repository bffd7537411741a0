"""Seeded workloads, side by side with a reference, with results as JSON."""
