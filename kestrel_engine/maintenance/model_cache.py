"""Lists and removes the models in the hub's cache. Sends no request to the hub."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..checkpoint.catalog import KNOWN
from ..errors import ConfigError


@dataclass(frozen=True, slots=True)
class DownloadedModel:
    """A repository in the cache. ``name``: the value of --model that names it."""

    name: str
    repository: str
    size_bytes: int
    folder: str


def downloaded() -> tuple[DownloadedModel, ...]:
    """Returns all models in the cache, sorted by name, including those that other programs downloaded."""
    found = []
    for repository in _repositories():
        name = next(
            (
                name
                for name, entry in KNOWN.items()
                if entry.hub is not None and entry.hub.repo == repository.repo_id
            ),
            repository.repo_id,
        )
        found.append(
            DownloadedModel(
                name, repository.repo_id, repository.size_on_disk, str(repository.repo_path)
            )
        )
    return tuple(sorted(found, key=lambda each: each.name))


def remove(name: str) -> DownloadedModel:
    """Deletes a model's files, in all revisions, from the cache. Raises ConfigError if the model isn't there."""
    from huggingface_hub import scan_cache_dir

    models = downloaded()
    wanted = next((each for each in models if name in (each.name, each.repository)), None)
    if wanted is None:
        names = ", ".join(each.name for each in models) or "no model"
        raise ConfigError("model", name, f"is not in the hub's cache, which holds {names}")
    revisions = [
        revision.commit_hash
        for repository in _repositories()
        if repository.repo_id == wanted.repository
        for revision in repository.revisions
    ]
    scan_cache_dir().delete_revisions(*revisions).execute()
    return wanted


def _repositories() -> list[Any]:
    from huggingface_hub import CacheNotFound, scan_cache_dir

    try:
        return [each for each in scan_cache_dir().repos if each.repo_type == "model"]
    except CacheNotFound:
        return []
