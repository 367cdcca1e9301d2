"""The back end that has TVM search: what its traces say, layers as it takes them, and tuning."""
