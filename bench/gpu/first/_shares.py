"""Whether kernels keep to the SMs of their share, launched by themselves or as parts of a captured graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from bench.gpu._sm_probe import LENGTH, SmSurvey, further_of, probing, survey
from bench.gpu._stats import plain


def divisions(groups: int) -> tuple[tuple[int, ...], ...]:
    """Groups of each share: halves, quarters, one share, and uneven ones; a remainder is left over."""
    half, quarter = groups // 2, groups // 4
    rest = groups - quarter
    asked = (half, half), (quarter,) * 4, (groups,), (quarter, rest), (rest // 2, quarter, rest // 2)
    return tuple(each for each in asked if all(each))


def split(device: Any, groups: Sequence[int]) -> dict[str, Any]:
    """Shares of so many groups: time to divide the device, and on how many SMs kernels run in them. Raises GpuError."""
    ends = np.cumsum(groups).tolist()
    parts = device.parts([(end - count, end) for end, count in zip(ends, groups, strict=True)])
    found = survey(device.shares)
    text = ", ".join(f"{share.size} asked {sms} granted {len(found.seen[share])} seen" for share, sms, _ in parts)
    text += f", {found.extra} beside their own" if found.extra > 0 else ""
    figures = {"value": plain(device.split_ns / 1e6), "unit": "ms", "granted": sum(sms for _, sms, _ in parts)}
    return {**figures, "detail": text, "error": "; ".join(found.problems)}


def two_in_one(device: Any, on_plain: bool) -> dict[str, Any]:
    """ONE graph captured over two shares, replayed on the stream it was captured on or on a plain one."""
    parts = device.parts([(0, 4), (4, 10)])
    (_, _, first), (_, _, second) = parts
    counts = [torch.zeros(LENGTH, dtype=torch.int32, device=device.name) for _ in parts]
    with probing(0) as probe:

        def both() -> None:
            second.wait_stream(first)
            for (_, granted, stream), count in zip(parts, counts, strict=True):
                probe.launch(stream.cuda_stream, count.data_ptr(), granted)
            first.wait_stream(second)

        device.sync()
        replay = device.capture(both, first)
        device.sync()
        for count in counts:
            count.zero_()
        device.sync()
        with device.on(device.stream() if on_plain else first):
            began = device.mark()
            replay()
            ended = device.mark()
            ended.synchronize()
        seen = {part[0]: tuple(count.nonzero().flatten().tolist()) for part, count in zip(parts, counts, strict=True)}
    found = SmSurvey(seen, {share: granted for share, granted, _ in parts}, further_of(0))
    text = f"{' and '.join(str(len(sms)) for sms in seen.values())} SMs, {len(found.common)} common"
    figures = {"value": plain(began.elapsed_time(ended)), "unit": "ms", "detail": text}
    return {**figures, "error": "; ".join(found.problems)}
