"""The script for `spark-submit`, in a folder of its own: Python looks for modules beside the script it runs."""
