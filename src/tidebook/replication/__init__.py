"""Engine-neutral replication: plan and apply slices of the log, and compare the store with the log."""
