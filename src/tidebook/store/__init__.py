"""The store: the replicated, queryable state of all journals. The pipeline writes it, and applications read it."""
