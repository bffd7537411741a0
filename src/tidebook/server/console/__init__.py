"""The web console: pages that show a book and run it."""
