"""Execution of one launch over several devices by a placement."""
