"""Remote books: the API of `Book` over HTTP, against a server that `tidebook serve` runs."""
