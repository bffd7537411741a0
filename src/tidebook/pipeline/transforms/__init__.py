"""DataFrame → DataFrame, and pure functions over batches."""
