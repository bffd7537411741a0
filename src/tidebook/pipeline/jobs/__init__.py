"""The Spark jobs, one module per command of `tidebook pipeline`."""
