"""The command line: one module a command group, each of which parses, calls and prints."""
