"""The parts of the benchmark of the domain layer, one module each."""
