"""Experiments of the papers, and how close we come to them."""
