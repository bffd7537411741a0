"""Register the Spark data source `tidebook` by package name.

Spark imports `pyspark_*` packages by itself, so `spark.read.format("tidebook")` works without a call to `register`.
"""

from tidebook.pipeline.source.format import TidebookSource as DefaultSource

__all__ = ["DefaultSource"]
