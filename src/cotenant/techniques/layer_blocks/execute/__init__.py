"""Running models on kernels that were compiled for them, and on onnxruntime where there are none."""
