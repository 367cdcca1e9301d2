"""Serving over the network: the Open Inference Protocol over HTTP and gRPC, metrics, the model repository."""
