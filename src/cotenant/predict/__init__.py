"""Latency prediction: the predictors that policies use, and their online calibration."""
