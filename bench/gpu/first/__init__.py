"""The first questions to a GPU, asked of the device itself: no server, no executor and no policy is in between."""

import os

os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # read once, when CUDA starts; 8 would queue behind others
