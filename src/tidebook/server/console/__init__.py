"""The web console: pages to inspect and to operate a book."""
