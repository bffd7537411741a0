"""The pure heart: no I/O, no driver, no clock of its own."""
