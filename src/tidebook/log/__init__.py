"""The log: every action is appended here first. It is ordered within each partition."""
