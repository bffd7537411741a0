"""Services of an async process: clock, ids, metrics, futures, micro-batching, backoff, blocking portal."""
