"""A write-ahead log shared by many tables."""
