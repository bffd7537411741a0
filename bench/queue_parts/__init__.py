"""The parts of `bench queue`, each of which adds its own figures."""
