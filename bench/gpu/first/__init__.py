"""The first questions to a GPU, asked of the device itself: no server, no executor and no policy is in between."""
