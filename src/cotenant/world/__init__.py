"""Worlds of the simulator: how long launches really take, independent of predictors."""
