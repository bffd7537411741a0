"""The parts and the reference jobs of `bench pipeline`."""
