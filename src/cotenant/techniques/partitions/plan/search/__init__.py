"""Column search for the cheapest plan, its moves, its bounds and its proofs."""
