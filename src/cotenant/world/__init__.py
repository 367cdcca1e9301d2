"""What really happens, for the simulator: worlds that say how long launches take. They know nothing of predictors."""
