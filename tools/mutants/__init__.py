"""Mutation testing: change one operator at a time and count how many changes the tests detect."""
