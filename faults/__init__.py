"""Test the system under faults: a workload of many processes, a schedule of faults, a checker and a report."""
