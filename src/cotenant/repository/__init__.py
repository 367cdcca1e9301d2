"""The model repository on disk: where what lies, which models and applications it declares. Opens no model."""

from cotenant.repository.model_versions import (
    ModelVersion,
    UnknownApplicationError,
    UnknownModelError,
    application_names,
    check_owners,
    find_versions,
    is_application,
    model_names,
    readable_versions,
    within,
)
from cotenant.repository.paths import (
    CONFIG_FILE,
    SERVER_FILE,
    STATE_FOLDER,
    contention_path,
    coruns_path,
    groups_path,
    overlap_path,
    profile_path,
    trace_path,
)

__all__ = [
    "CONFIG_FILE",
    "SERVER_FILE",
    "STATE_FOLDER",
    "ModelVersion",
    "UnknownApplicationError",
    "UnknownModelError",
    "application_names",
    "check_owners",
    "contention_path",
    "coruns_path",
    "find_versions",
    "groups_path",
    "is_application",
    "model_names",
    "overlap_path",
    "profile_path",
    "readable_versions",
    "trace_path",
    "within",
]
