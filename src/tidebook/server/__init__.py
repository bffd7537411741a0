"""The HTTP server of a book: routes, security, streams, audit and graceful shutdown."""
