"""The parts of the benchmark of the domain layer: each has `measure()`, which returns ratios and figures."""
