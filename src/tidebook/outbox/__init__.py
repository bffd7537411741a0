"""Messages written in the application's SQL transaction and relayed to the log."""
