"""Verifies a model's files: checksums, names and shapes of tensors, and values. See also known_answers.py."""

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
from .finding import Finding
from .model_download import named_files

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
    """Yields one finding after each check. It reads every byte twice, once for checksums and once as numbers."""
    hub = hub or Hub(progress=progress, offline=config.offline)
    try:
        opened = open_model(config, hub=hub, progress=progress)
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
        from_hub = _checksums_from_hub(config, files, hub)
        yield _checksums(files, from_hub, record, progress)
    except (CheckpointError, OSError) as error:
        yield Finding("checksums", "fail", str(error), _AGAIN)
    if opened.plan.faults:
        message = str(checkpoint_error(str(folder), opened.plan.faults, hint=opened.hint))
        remedy = "check --weights: these are another model's weights, or damaged"
        yield Finding("tensors", "fail", message, remedy)
        return
    yield _tensors(opened)
    try:
        yield _values(opened, progress)
    except KestrelError as error:
        yield Finding("values", "fail", str(error), _AGAIN)
    if opened.plan.kv_scales:
        yield _kv_scales(opened)


def _checksums_from_hub(
    config: RuntimeConfig, files: Mapping[str, Path], hub: Hub
) -> dict[str, str]:
    """Requests the checksums of files without a recorded one from the hub, if ``config.model`` names the model."""
    unknown = [name for name, file in files.items() if not _recorded(file)]
    try:
        source = resolve(config.model)
    except ConfigError:
        return {}
    if source.hub is None or not unknown:
        return {}
    sums = {}
    for name in unknown:
        place = HubFile(source.hub.repo, source.hub.revision, sibling(source.hub, name))
        if name == TOKENIZER_NAME and isinstance(source.tokenizer, HubFile):
            place = source.tokenizer
        if (found := hub.checksum(place)) is not None:
            sums[name] = found
    return sums


def _recorded(file: Path) -> tuple[str, str] | None:
    """Returns a file's recorded checksum and its source; None without a record. Raises CheckpointError."""
    if (digest := checksums.recorded_by_hub(file)) is not None:
        return digest, "the hub"
    digest = checksums.read_sums(file.parent).get(file.name)
    return None if digest is None else (digest, checksums.NAME)


def _checksums(
    files: Mapping[str, Path], from_hub: Mapping[str, str], record: bool, progress: Progress | None
) -> Finding:
    """Compares the files with their recorded checksums, or else with those ``from_hub``.

    Raises CheckpointError and OSError.
    """
    expected: dict[str, str] = {}
    sources: dict[str, None] = {}
    for name, file in files.items():
        if (recorded := _recorded(file)) is not None:
            expected[name] = recorded[0]
            sources[recorded[1]] = None
        elif name in from_hub:
            expected[name] = from_hub[name]
            sources["the hub"] = None
    wrong = [
        name
        for name, digest in expected.items()
        if checksums.checksum(files[name], like=digest, progress=progress) != digest
    ]
    unknown = [name for name in files if name not in expected]
    source = " and ".join(sources)
    if wrong:
        message = f"{', '.join(wrong[:SHOWN])}: differs from the checksum recorded by {source}"
        remedy = _OTHER if any(name in from_hub for name in wrong) else _AGAIN
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


def _tensors(opened: OpenedModel) -> Finding:
    plan = opened.plan
    rest = f"; {len(plan.ignored)} other tensors are not used" if plan.ignored else ""
    return Finding(
        "tensors",
        "ok",
        f"{len(plan.tensors)} tensors, {plan.num_elements / 1e6:,.1f} M numbers: names and shapes are "
        f"{opened.config.family}'s{rest}",
    )


def _values(opened: OpenedModel, progress: Progress | None) -> Finding:
    """Checks that all values are finite. Raises CheckpointError."""
    nonfinite, fingerprint = check_values(opened.plan, opened.files, progress)
    if nonfinite:
        more = f" and {len(nonfinite) - SHOWN} more" if len(nonfinite) > SHOWN else ""
        message = f"NaN or infinite: {', '.join(nonfinite[:SHOWN])}{more}"
        return Finding("values", "fail", message, _AGAIN)
    return Finding("values", "ok", f"all are finite; fingerprint {fingerprint}")


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
