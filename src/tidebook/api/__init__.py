"""The HTTP API as data: requests, answers, errors and routes, shared by the server and by remote books."""
