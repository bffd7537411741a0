"""The parts of `bench pipeline`."""
