"""The HTTP API as data: requests, responses, errors and routes, shared by the server and by remote books."""
