"""The parts of `bench queue`, each of which fills in figures of its own."""
