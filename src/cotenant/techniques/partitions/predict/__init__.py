"""How much launches slow down beside others (GPU-let, ATC'22)."""
