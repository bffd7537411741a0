"""What outbox and queue ask of a database. The adapters stand beside this package, one folder a database."""
