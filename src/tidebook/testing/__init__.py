"""What users and Tidebook itself test with: conformance suites, faults, clocks, histories, real servers."""
