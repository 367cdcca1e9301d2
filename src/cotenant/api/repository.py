"""`cotenant.Repository`: a model repository on disk."""

from __future__ import annotations

import os
from pathlib import Path

from cotenant.config import ModelConfig, ServerConfig
from cotenant.profiles.profile_file import Profile, load_profile
from cotenant.repository import application_names, default_version, model_names, profile_path
from cotenant.repository.server_settings import settings_of


class ModelRepository:
    """A directory with `MODEL/config.toml` and `MODEL/VERSION/model.onnx`. Reads the files at each call.

    >>> import tempfile
    >>> root = Path(tempfile.mkdtemp())
    >>> (root / "resnet" / "1").mkdir(parents=True)
    >>> _ = (root / "resnet" / "1" / "model.onnx").write_bytes(b"")
    >>> _ = (root / "resnet" / "config.toml").write_text("[tenant]\\nslo_ms = 100\\n")
    >>> repository = ModelRepository(root)
    >>> repository.models
    ('resnet',)
    >>> repository.config("resnet").tenant.slo_ms
    100.0
    >>> repository.profile is None
    True

    Raises ConfigError where `path` is no directory.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        model_names(self.path)  # raises ConfigError

    def __repr__(self) -> str:
        return f"cotenant.Repository({str(self.path)!r})"

    def __fspath__(self) -> str:
        return str(self.path)

    @property
    def models(self) -> tuple[str, ...]:
        """The names of the models, in alphabetical order."""
        return model_names(self.path)

    @property
    def applications(self) -> tuple[str, ...]:
        """The names of the applications, each of which runs several models for one request."""
        return application_names(self.path)

    @property
    def settings(self) -> ServerConfig:
        """The settings of `cotenant.toml`, with defaults for all else. Raises ConfigError."""
        return settings_of(self.path)

    @property
    def profile(self) -> Profile | None:
        """The profile that `cotenant.profile` saved; None without one. Raises ProfileError for an unreadable file."""
        path = profile_path(self.path)
        return load_profile(path) if path.exists() else None

    def config(self, model: str) -> ModelConfig:
        """The `config.toml` of a model. Raises ConfigError for an unknown model or a wrong file."""
        return default_version(self.path, model).config
