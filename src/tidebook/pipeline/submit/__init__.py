"""The script for `spark-submit`, alone in its folder, because Python puts the script's folder on sys.path."""
