"""The Open Inference Protocol: messages, codecs and a small client."""
