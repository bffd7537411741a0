"""SQL that does not depend on a driver: text and parameters, made by pure functions."""
