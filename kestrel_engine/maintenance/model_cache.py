"""Models in the hub's cache: what is there, and its removal. Asks no hub."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..checkpoint.catalog import KNOWN
from ..errors import ConfigError


@dataclass(frozen=True, slots=True)
class Downloaded:
    """A repository in the cache: ``name`` as --model takes it."""

    name: str
    repository: str
    size_bytes: int
    folder: str


def downloaded() -> tuple[Downloaded, ...]:
    """All models in the cache, whatever fetched them, by name."""
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
            Downloaded(name, repository.repo_id, repository.size_on_disk, str(repository.repo_path))
        )
    return tuple(sorted(found, key=lambda each: each.name))


def remove(name: str) -> Downloaded:
    """Deletes a model's files, of every revision, from the cache. Raises ConfigError if it isn't there."""
    from huggingface_hub import scan_cache_dir

    there = downloaded()
    wanted = next((each for each in there if name in (each.name, each.repository)), None)
    if wanted is None:
        names = ", ".join(each.name for each in there) or "nothing"
        raise ConfigError("model", name, f"is not in the hub's cache; there is {names}")
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
