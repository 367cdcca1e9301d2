"""The clairvoyant relaxation: one server as fast as all cores together, preemptive EDF, the least work in time."""

from __future__ import annotations

from typing import Any

import numpy as np


def met_in_time(times: Any, who: Any, slo: Any, work: Any, met: Any) -> int:
    """Counts in `met` how many queries of each tenant end in time; gives how many do in all.

    `work` is by tenant, in ns of the server: the least core time with which a query can be in time, over the cores. The
    earliest deadline goes first; a query that cannot be in time any more is dropped. It ignores that a query cannot use
    all cores well, that memory is shared, and the cost of a switch. So no policy does better at loads that can be
    borne.
    """
    n = len(times)
    deadline, left, tenant = np.zeros(n, np.int64), np.zeros(n, np.int64), np.zeros(n, np.int64)
    active, now, done = 0, 0, 0
    for arrived in range(n + 1):
        until = times[arrived] if arrived < n else 1 << 62
        while active > 0 and now < until:
            best = 0
            for i in range(1, active):
                if deadline[i] < deadline[best]:
                    best = i
            ran = 0
            if now + left[best] <= deadline[best]:
                ran = min(left[best], until - now)
                left[best] -= ran
                now += ran
                if left[best] > 0:
                    continue
                met[tenant[best]] += 1
                done += 1
            active -= 1
            deadline[best], left[best], tenant[best] = deadline[active], left[active], tenant[active]
        if arrived < n:
            t = who[arrived]
            now = max(now, until)
            deadline[active], left[active], tenant[active] = until + slo[t], work[t], t
            active += 1
    return done
