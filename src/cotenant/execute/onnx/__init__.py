"""Running ONNX models with onnxruntime, any range of their units, and the executor on threads of this process."""
