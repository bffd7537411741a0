"""The queues that are measured beside one another, each behind the same few names."""
