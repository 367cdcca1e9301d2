"""Where requests come in: HTTP and gRPC."""
