"""Found by Spark through its name: `spark.read.format("tidebook")` works where Tidebook is installed, unregistered."""

from tidebook.pipeline.source.format import TidebookSource as DefaultSource

__all__ = ["DefaultSource"]
