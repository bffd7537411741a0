"""The parts of `bench queue`, each of which fills in its own figures."""
