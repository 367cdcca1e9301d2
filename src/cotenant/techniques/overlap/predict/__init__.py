"""What launches take that start together: the overlap-aware predictor (Abacus, SC'21)."""
