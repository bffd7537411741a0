"""The HTTP service and the console."""
