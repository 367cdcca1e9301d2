"""`python -m bench.judge REPO`: how well a repository's groups and co-runs are predicted, as pages beside its samples.

Needs what `cotenant profile REPO --groups` and `--corun` have measured.
"""

from __future__ import annotations

import sys
from pathlib import Path

from bench._judge_coruns import report_of
from bench._judge_coruns_page import write_corun_report
from bench._judge_groups import cross_validate
from bench._judge_groups_page import write_predictor_report
from cotenant.errors import CotenantError
from cotenant.profiles.profile_file import Profile, load_profile
from cotenant.repository import coruns_path, groups_path, profile_path
from cotenant.techniques.overlap.group_samples import load_samples
from cotenant.techniques.overlap.measure.measured_groups import facts_of
from cotenant.techniques.partitions.cli.profile_corun import factor_cells
from cotenant.techniques.partitions.measure.corun_interference import valid_rows


def main(root: Path) -> list[Path]:
    """Write the pages for which there are samples; says which. Raises CotenantError."""
    profile = load_profile(profile_path(root))
    pages = [page for page in (_groups(root, profile), _coruns(root, profile)) if page is not None]
    for page in pages:
        print(f"written: {page}")
    return pages


def _groups(root: Path, profile: Profile) -> Path | None:
    if not groups_path(root).exists():
        return None
    _, samples = load_samples(groups_path(root))
    known = [each for each in samples if all(member.work.tenant in profile.models for member in each.members)]
    page = groups_path(root).with_name("predictor.html")
    write_predictor_report(page, cross_validate(known, facts_of(profile)))
    return page


def _coruns(root: Path, profile: Profile) -> Path | None:
    rows = valid_rows(root, profile) if coruns_path(root).exists() else ()
    found = report_of(rows)
    if found is None:
        return None
    page = coruns_path(root).with_suffix(".html")
    table = ("Factors", *factor_cells(rows))
    write_corun_report(page, "What models cost each other in partitions", found.lead, found.curve, [table])
    return page


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m bench.judge REPO")
    try:
        main(Path(sys.argv[1]))
    except CotenantError as error:
        sys.exit(f"bench.judge: {error}")
