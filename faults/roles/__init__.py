"""The roles of the workload, one for each kind of process."""
