"""The data pipeline on Spark, through PySpark: replication, verification, export, and data sources."""
