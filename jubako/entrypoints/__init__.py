"""Where users come in: the Python class, the command line and the HTTP server."""
