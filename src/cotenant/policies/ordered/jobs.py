"""What is inside, as columns: of each tenant's queue once, until that changes; of all, in the policy's order."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from cotenant.core.snapshot import QueueView

Column = NDArray[np.int64]
AnyColumn = NDArray[np.float64 | np.int64]


RANK, DEADLINE, NUMBER, DUE, ENTITLED, ANSWERS, OWNER, WORK = range(8)
"""Rows of Jobs, the first three in the order of what keys begin with."""


class Jobs:
    """Jobs, by rank and then by deadline: a row of `rows` for each thing to know, a column for each job.

    Times are from now on. `rank` is its priority, smallest first. `due_ns` is its deadline, or when it is due within an
    entitlement, which `is_entitled` says (1 or 0). `work_ns` is what it takes of a lane. `owner` is the number of its
    tenant, `answers` that of queries in it. `number` is that of its query, or below zero that of a batch.
    """

    __slots__ = ("answers", "deadline_ns", "due_ns", "is_entitled", "number", "owner", "rank", "rows", "work_ns")

    def __init__(self, rows: Column) -> None:
        self.rows = rows
        self.rank, self.deadline_ns, self.number, self.due_ns = rows[:ENTITLED]
        self.is_entitled, self.answers, self.owner, self.work_ns = rows[ENTITLED:]

    def at(self, chosen: NDArray[np.intp]) -> Jobs:
        """The jobs at these positions."""
        return Jobs(self.rows.take(chosen, 1))


class Waiting:
    """The queries of a queue at one of its editions, as `rows` of Jobs with times as they are.

    `works` are the different ones that they have; `rank` is the priority of all, None where they differ.
    """

    __slots__ = ("_due", "_kind", "_needed", "_owner", "edition", "rank", "rows", "works")

    def __init__(self, queue: QueueView, dues: Mapping[int, int]) -> None:
        """Of a queue that is not empty, whose keys begin with rank and deadline and end with the number."""
        queries, keys, tenant = queue.queries, queue.keys, queue.tenant
        self.edition = queue.edition
        self.rows = rows = np.zeros((8, len(queries)), np.int64)
        rows[:DUE] = np.array(keys).T
        rows[DUE], rows[ANSWERS] = rows[DEADLINE], 1
        self._due: Column | None = None
        if dues:
            due = np.array([dues.get(key[2], -1) for key in keys])
            rows[ENTITLED] = is_entitled = due >= 0
            np.copyto(rows[DUE], due, where=is_entitled)
            self._due = rows[DUE].copy()
        self.rank: int | None = keys[0][0]
        self._needed, self._owner = list[tuple[int, int]](), -1
        self._kind: NDArray[np.intp] | None = None
        if queue.are_alike:
            self.works = [tenant.work(queries[0].shape, queries[0].items)]
            return
        if any(key[0] != self.rank for key in keys):
            self.rank = None
        known: dict[tuple[int, int], int] = {}
        self._kind = np.array([known.setdefault((query.shape, query.items), len(known)) for query in queries])
        self.works = [tenant.work(*each) for each in known]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Waiting) and self.edition is other.edition

    __hash__ = None  # type: ignore[assignment]

    def told(self, owner: int, needed_ns: list[tuple[int, int]]) -> Column:
        """The rows, for the tenant's number and what each of the works takes of a lane now, and may take longer."""
        if needed_ns != self._needed or owner != self._owner:
            self._needed, self._owner, rows = needed_ns, owner, self.rows
            rows[OWNER] = owner
            longer: int | Column
            if self._kind is None:
                rows[WORK], longer = needed_ns[0]
            else:
                rows[WORK], longer = np.array(needed_ns)[self._kind].T
            if self._due is not None:
                rows[DUE] = np.minimum(self._due, rows[DEADLINE] - longer * rows[ENTITLED])
        return self.rows
