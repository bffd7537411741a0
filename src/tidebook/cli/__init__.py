"""The command line: one module per command group, each of which parses, calls and prints."""
