"""Apache Kafka: settings, client configuration and errors, shared by the log and the outbox."""
