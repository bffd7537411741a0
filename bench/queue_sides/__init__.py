"""The queues that are compared, all with the same few methods."""
