"""Measured latencies of groups: which groups to measure, and the file that keeps what was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from pathlib import Path
from random import Random
from statistics import median

import msgspec

from cotenant.errors import CotenantError, InvalidValueError
from cotenant.files import write_whole
from cotenant.predict.protocol import Group, Member
from cotenant.types import Tenant

FORMAT = "cotenant-groups/1"
SOLO_SHARE = 0.1
"""Groups of one: the scheduler launches them when nothing else waits."""
FROM_ZERO_SHARE = 1 / 3
"""Members that begin their model: new queries are far more frequent than batches paused at any one cut."""


class SamplesError(CotenantError):
    """A file of samples cannot be used: names the file and what was expected."""


@dataclass(frozen=True, slots=True)
class GroupSample:
    """What one group took: `runs_ns` are latencies from its common start to the end of its last member.

    Raises InvalidValueError for a group without members, or without runs that took time.
    """

    members: Group
    runs_ns: tuple[int, ...]

    def __post_init__(self) -> None:
        names = [member.tenant for member in self.members]
        if not names:
            raise InvalidValueError("group sample", "members", names, "at least one")
        if not self.runs_ns or min(self.runs_ns) <= 0:
            raise InvalidValueError("group sample", "runs_ns", self.runs_ns, "positive latencies, at least one")

    @property
    def median_ns(self) -> float:
        """Median of the runs."""
        return float(median(self.runs_ns))


@dataclass(frozen=True, slots=True)
class SamplesHeader:
    """First line of a file of samples: what they were measured on, when and by which command.

    `digests` identify the model of each tenant as the profile does.
    """

    fingerprint: str
    created: str
    command: str
    digests: dict[str, str]
    format: str = FORMAT


def save_samples(path: Path, header: SamplesHeader, samples: Sequence[GroupSample]) -> None:
    """Write one JSON line for the header and one a sample; a reader sees the old file or the new one."""
    write_whole(path, b"".join(msgspec.json.encode(line) + b"\n" for line in (header, *samples)))


def load_samples(path: Path) -> tuple[SamplesHeader, list[GroupSample]]:
    """Read what `save_samples` wrote. Raises SamplesError when it is not that."""
    number = 0
    try:
        first, *lines = path.read_bytes().splitlines() or [b""]
        header = msgspec.json.decode(first, type=SamplesHeader)
        if header.format != FORMAT:
            raise SamplesError(f"{path}: format is {header.format!r}, expected {FORMAT!r}; measure the groups anew")
        samples = []
        for number, line in enumerate(lines, 1):  # noqa: B007  (read below when a line is wrong)
            samples.append(msgspec.json.decode(line, type=GroupSample))
    except OSError as error:
        raise SamplesError(
            f"{path}: cannot be read ({error.strerror}); make it with 'cotenant profile --groups'"
        ) from None
    except msgspec.MsgspecError as error:
        raise SamplesError(
            f"{path}, line {number + 1}: is no sample of a group ({error}); remove the file and measure the groups anew"
        ) from None
    return header, samples


def sample_groups(
    tenants: Sequence[Tenant],
    sizes: Mapping[str, Sequence[int]],
    lanes: Sequence[int],
    count: int,
    seed: int,
    *,
    shapes: Mapping[str, int] | None = None,
    slots: int = 0,
    repeat: bool = False,
) -> list[Group]:
    """Draw `count` groups that the scheduler can form (Abacus, SC'21, section 5.4: instance-based sampling).

    A group has 1 to `slots` members (0: one a lane) of distinct tenants, or with `repeat` of any, ordered by tenant.
    One member runs to its last unit; the others are any stretch between cuts, since a scheduler cuts only what runs
    beside the query that it wants to finish. Batches come from `sizes`, shapes are numbers below `shapes` (1 by
    default). All lanes, given by their cores, are shared out: each member gets one or several neighbouring ones.

    Raises InvalidValueError when there is no tenant, lane or batch size, or a tenant is there twice.
    """
    names = [tenant.name for tenant in tenants]
    if not tenants or len(set(names)) != len(names):
        raise InvalidValueError("sampling of groups", "tenants", names, "distinct ones, at least one")
    if not lanes or min(lanes) < 1:
        raise InvalidValueError("sampling of groups", "lanes", list(lanes), "the cores of at least one lane")
    for name in names:
        if not sizes.get(name):
            raise InvalidValueError("sampling of groups", "sizes", sizes.get(name), f"batch sizes of {name!r}")
    random = Random(seed)
    most = min(slots or len(lanes), len(lanes), len(lanes) if repeat else len(tenants))
    order = sorted(range(len(tenants)), key=names.__getitem__)
    groups: list[Group] = []
    for _ in range(count):
        size = 1 if most == 1 or random.random() < SOLO_SHARE else random.randint(2, most)
        chosen = sorted(random.choices(order, k=size) if repeat else random.sample(order, size), key=order.index)
        cores = _share_out(lanes, size, random)
        leader = random.randrange(size)
        groups.append(
            tuple(
                _member(tenants[which], sizes, (shapes or {}).get(names[which], 1), share, place == leader, random)
                for place, (which, share) in enumerate(zip(chosen, cores, strict=True))
            )
        )
    return groups


def _member(
    tenant: Tenant, sizes: Mapping[str, Sequence[int]], shapes: int, cores: int, to_end: bool, random: Random
) -> Member:
    cuts = tenant.cuts
    start = 0 if random.random() < FROM_ZERO_SHARE else random.randrange(len(cuts) - 1)
    end = len(cuts) - 1 if to_end else random.randrange(start + 1, len(cuts))
    items = random.choice(sizes[tenant.name])
    return Member(tenant.name, random.randrange(shapes), items, cuts[start], cuts[end], cores)


def _share_out(lanes: Sequence[int], members: int, random: Random) -> tuple[int, ...]:
    """Cores of each member when neighbouring lanes go together, all ways to cut being equally likely."""
    ways = list(combinations(range(1, len(lanes)), members - 1)) if len(lanes) <= 16 else None
    inner = random.choice(ways) if ways else tuple(sorted(random.sample(range(1, len(lanes)), members - 1)))
    return tuple(sum(lanes[a:b]) for a, b in pairwise((0, *inner, len(lanes))))
