"""Spark data sources over logs and stores."""
