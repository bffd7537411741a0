"""The domain layer: typed events, deciders, projections and process managers over the journals of a book."""
