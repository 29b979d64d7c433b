"""Verifies a model's files: checksums, names and shapes of tensors, and values. See also acceptance.py."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ..checkpoint import checksums
from ..checkpoint.catalog import HubFile, resolve
from ..checkpoint.hub import Hub, sibling
from ..checkpoint.open import OpenedModel, open_model
from ..checkpoint.tokenizer_file import NAME as TOKENIZER_NAME
from ..checkpoint.weights import kv_scales
from ..checkpoint.weights.loader import check_values
from ..checkpoint.weights.plan import SHOWN, checkpoint_error
from ..config.runtime import RuntimeConfig
from ..errors import CheckpointError, ConfigError, KestrelError
from ..preprocess.tokenizer import Tokenizer
from .acceptance import check_tokenizer
from .finding import Finding
from .model_download import named_files
from .releases import Release, release_of

if TYPE_CHECKING:
    from ..types.progress import Progress

_OTHER = "if it is of another revision, name that: --model NAME@REVISION; else download it again"
_AGAIN = "delete the file and download it again (kestrel-grpc download)"


def verify(
    config: RuntimeConfig,
    *,
    hub: Hub | None = None,
    record: bool = False,
    progress: Progress | None = None,
) -> Iterator[Finding]:
    """Yields one finding after each check. It reads every byte twice, once for checksums and once as numbers.

    Raises ConfigError if a setting does not fit the files.
    """
    hub = hub or Hub(progress=progress, offline=config.offline)
    try:
        opened = open_model(config, hub=hub, progress=progress)
    except ConfigError:
        raise
    except KestrelError as error:
        yield Finding("files", "fail", str(error), "name the model, or run kestrel-grpc download")
        return
    files = named_files(opened)
    size = sum(file.stat().st_size for file in files.values())
    folder = opened.files[0].parent
    yield Finding(
        "files", "ok", f"{opened.name}: {len(files)} files, {size / 1e6:,.1f} MB in {folder}"
    )
    try:
        released = _released_checksums(config, files, hub)
        yield _checksums(files, released, record, progress)
    except (CheckpointError, OSError) as error:
        yield Finding("checksums", "fail", str(error), _AGAIN)
    if opened.plan.faults:
        message = str(checkpoint_error(str(folder), opened.plan.faults, hint=opened.hint))
        remedy = "check --weights: these are another model's weights, or damaged"
        yield Finding("tensors", "fail", message, remedy)
        return
    release = release_of(config.model)[1]
    yield _tensors(opened, release)
    if release is not None and release.tokenizer is not None:
        try:
            yield check_tokenizer(Tokenizer.from_file(opened.tokenizer_path), release.tokenizer)
        except CheckpointError as error:
            yield Finding("tokenizer", "fail", str(error), _AGAIN)
    try:
        yield _values(opened, progress)
    except KestrelError as error:
        yield Finding("values", "fail", str(error), _AGAIN)
    if opened.plan.kv_scales:
        yield _kv_scales(opened)


def _released_checksums(
    config: RuntimeConfig, files: Mapping[str, Path], hub: Hub
) -> dict[str, tuple[str, str]]:
    """Returns checksums and their sources, if ``config.model`` names the model: of the catalogue, else of the hub."""
    try:
        source = resolve(config.model)
    except ConfigError:
        return {}
    if source.hub is None:
        return {}
    sums = {}
    for name, file in files.items():
        place = HubFile(
            source.hub.repo,
            source.hub.revision,
            sibling(source.hub, name),
            sha256=source.hub.sha256 if name == source.hub.file else None,
        )
        if name == TOKENIZER_NAME and isinstance(source.tokenizer, HubFile):
            place = source.tokenizer
        if place.sha256 is not None:
            sums[name] = (place.sha256, "the catalogue")
        elif not _recorded(file) and (found := hub.checksum(place)) is not None:
            sums[name] = (found, "the hub")
    return sums


def _recorded(file: Path) -> tuple[str, str] | None:
    """Returns a file's recorded checksum and its source; None without a record. Raises CheckpointError."""
    if (digest := checksums.recorded_by_hub(file)) is not None:
        return digest, "the hub"
    digest = checksums.read_sums(file.parent).get(file.name)
    return None if digest is None else (digest, checksums.NAME)


def _checksums(
    files: Mapping[str, Path],
    released: Mapping[str, tuple[str, str]],
    record: bool,
    progress: Progress | None,
) -> Finding:
    """Compares files with the ``released`` or else their recorded checksums. Raises CheckpointError and OSError."""
    expected: dict[str, str] = {}
    sources: dict[str, None] = {}
    for name, file in files.items():
        if (known := released.get(name) or _recorded(file)) is not None:
            expected[name] = known[0]
            sources[known[1]] = None
    wrong = [
        name
        for name, digest in expected.items()
        if checksums.checksum(files[name], like=digest, progress=progress) != digest
    ]
    unknown = [name for name in files if name not in expected]
    source = " and ".join(sources)
    if wrong:
        message = f"{', '.join(wrong[:SHOWN])}: differs from the checksum recorded by {source}"
        remedy = _OTHER if any(name in released for name in wrong) else _AGAIN
        return Finding("checksums", "fail", message, remedy)
    matching = f"{len(expected)} files match the checksums recorded by {source}"
    if not unknown:
        return Finding("checksums", "ok", matching)
    if record:
        return _record(files, progress)
    message = f"no checksum is recorded for {', '.join(unknown[:SHOWN])}"
    if expected:
        message += f"; {matching}"
    return Finding("checksums", "warn", message, "--record writes SHA256SUMS for later checks")


def _record(files: Mapping[str, Path], progress: Progress | None) -> Finding:
    """Writes SHA256SUMS beside the files. Raises OSError."""
    folders = {file.parent for file in files.values()}
    for folder in folders:
        own = [file for file in files.values() if file.parent == folder]
        sums = {file.name: checksums.checksum(file, progress=progress) for file in own}
        checksums.write_sums(folder, {**checksums.read_sums(folder), **sums})
    where = ", ".join(str(folder / checksums.NAME) for folder in sorted(folders))
    return Finding("checksums", "ok", f"recorded {len(files)} files in {where}")


def _tensors(opened: OpenedModel, release: Release | None) -> Finding:
    plan = opened.plan
    dtypes = sorted({stored.dtype for item in plan.tensors for stored in item.sources})
    number = sum(len(item.sources) for item in plan.tensors) + len(plan.ignored)
    rest = f"; {len(plan.ignored)} other tensors are not used" if plan.ignored else ""
    message = (
        f"{len(plan.tensors)} tensors, {plan.num_elements / 1e6:,.1f} M numbers ({', '.join(dtypes)}): names and "
        f"shapes are {opened.config.family}'s{rest}"
    )
    if release is not None and release.stored not in (None, (number, *dtypes)):
        message += f"; but the release has {release.stored[0]} tensors of {release.stored[1]}"
        return Finding("tensors", "warn", message, _OTHER)
    return Finding("tensors", "ok", message)


def _values(opened: OpenedModel, progress: Progress | None) -> Finding:
    """Checks that all values are finite. Raises CheckpointError."""
    nonfinite, constant, fingerprint = check_values(opened.plan, opened.files, progress)
    for names, fault in ((nonfinite, "NaN or infinite"), (constant, "the same value everywhere")):
        if names:
            more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
            message = f"{fault}: {', '.join(names[:SHOWN])}{more}"
            return Finding("values", "fail", message, _AGAIN)
    return Finding("values", "ok", f"finite, and no matrix is constant; fingerprint {fingerprint}")


def _kv_scales(opened: OpenedModel) -> Finding:
    layers = opened.config.text.n_layers
    try:
        scales = kv_scales.read(opened.plan, opened.files, layers)
    except CheckpointError as error:
        return Finding("KV scales", "fail", str(error), _AGAIN)
    if some := kv_scales.incomplete(opened.plan, layers):
        remedy = (
            "they are used only with --precision fp8 and fp8-kv, which uses 1 for the missing ones"
        )
        return Finding("KV scales", "warn", some, remedy)
    found = [scale for pair in scales for scale in pair]
    return Finding("KV scales", "ok", f"all {layers} layers': {min(found):g} to {max(found):g}")
