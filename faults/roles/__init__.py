"""The roles of the workload: what each of its processes does."""
