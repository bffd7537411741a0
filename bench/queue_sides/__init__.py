"""The queues that are measured beside one another, each with the same few methods."""
