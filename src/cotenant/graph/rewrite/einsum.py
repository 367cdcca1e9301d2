"""Equations of Einstein sums, in the notation of both formats."""

from __future__ import annotations

from collections.abc import Sequence

from cotenant.graph.rewrite.rows import AxisMap


def einsum_maps(equation: str, ranks: Sequence[int]) -> tuple[AxisMap, ...] | None:
    """Axis maps of the inputs; None for equations with dots, or equations that do not fit."""
    text = equation.replace(" ", "")
    left, arrow, right = text.partition("->")
    terms = left.split(",")
    if "." in text or len(terms) != len(ranks) or any(len(t) != rank for t, rank in zip(terms, ranks, strict=True)):
        return None
    if not arrow:
        letters = sorted(set(left) - {","})
        right = "".join(each for each in letters if left.count(each) == 1)
    return tuple(tuple(right.index(letter) if letter in right else None for letter in term) for term in terms)
