"""Commands of this technique."""
