"""The store: where journals are kept for ever, written by the pipeline, read by everybody."""
