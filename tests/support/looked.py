"""Queries that count how many of them a policy looks at."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from cotenant.types import Query


class Looked(list[Query]):
    """Queries, with a count of how many were looked at."""

    looks = 0

    def __getitem__(self, at: Any) -> Any:
        self.looks += 1 if isinstance(at, int) else len(range(*at.indices(len(self))))
        return super().__getitem__(at)

    def __iter__(self) -> Iterator[Query]:
        for query in super().__iter__():
            self.looks += 1
            yield query
