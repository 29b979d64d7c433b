"""Are a model's files what they should be? Checksums, names and shapes, values. Known answers: known_answers.py."""

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
from ..config import RuntimeConfig
from ..errors import CheckpointError, ConfigError, KestrelError
from .finding import Finding
from .model_download import named_files

if TYPE_CHECKING:
    from ..checkpoint.progress import Progress

_OTHER = "of another revision? Name it: --model NAME@REVISION; else download it again"
_AGAIN = "delete the file and download it again (kestrel-grpc download)"


def verify(
    config: RuntimeConfig,
    *,
    hub: Hub | None = None,
    record: bool = False,
    progress: Progress | None = None,
) -> Iterator[Finding]:
    """One finding for each check, as it is done. Reads every byte twice: for checksums, and as numbers."""
    hub = hub or Hub(progress=progress, offline=config.offline)
    try:
        opened = open_model(config, hub=hub, progress=progress)
    except KestrelError as error:
        yield Finding(
            "files", "fail", str(error), "name the model, or fetch it: kestrel-grpc download"
        )
        return
    files = named_files(opened)
    size = sum(file.stat().st_size for file in files.values())
    folder = opened.files[0].parent
    yield Finding(
        "files", "ok", f"{opened.name}: {len(files)} files, {size / 1e6:,.1f} MB in {folder}"
    )
    try:
        asked = _asked(config, files, hub)
        yield _checksums(files, asked, record, progress)
    except (CheckpointError, OSError) as error:
        yield Finding("checksums", "fail", str(error), _AGAIN)
    if opened.plan.faults:
        told = str(checkpoint_error(str(folder), opened.plan.faults, hint=opened.hint))
        yield Finding("tensors", "fail", told, "these are another model's weights, or broken")
        return
    yield _tensors(opened)
    try:
        yield _values(opened, progress)
    except KestrelError as error:
        yield Finding("values", "fail", str(error), _AGAIN)
    if opened.plan.kv_scales:
        yield _kv_scales(opened)


def _asked(config: RuntimeConfig, files: Mapping[str, Path], hub: Hub) -> dict[str, str]:
    """What the hub says now of files that came by path and have no record, if ``config.model`` says what they are."""
    unknown = [name for name, file in files.items() if not _recorded(file)]
    try:
        source = resolve(config.model)
    except ConfigError:
        return {}
    if source.hub is None or not unknown:
        return {}
    said = {}
    for name in unknown:
        place = HubFile(source.hub.repo, source.hub.revision, sibling(source.hub, name))
        if name == TOKENIZER_NAME and isinstance(source.tokenizer, HubFile):
            place = source.tokenizer
        if (found := hub.checksum(place)) is not None:
            said[name] = found
    return said


def _recorded(file: Path) -> tuple[str, str] | None:
    """A checksum and who recorded it. Raises CheckpointError."""
    if (said := checksums.recorded_by_hub(file)) is not None:
        return said, "the hub"
    said = checksums.read_sums(file.parent).get(file.name)
    return None if said is None else (said, checksums.NAME)


def _checksums(
    files: Mapping[str, Path], asked: Mapping[str, str], record: bool, progress: Progress | None
) -> Finding:
    """``asked``: what the hub says now. Raises CheckpointError, OSError."""
    recorded: dict[str, str] = {}
    by: dict[str, None] = {}
    for name, file in files.items():
        if (said := _recorded(file)) is not None:
            recorded[name] = said[0]
            by[said[1]] = None
        elif name in asked:
            recorded[name] = asked[name]
            by["the hub"] = None
    wrong = [
        name
        for name, said in recorded.items()
        if checksums.checksum(files[name], like=said, progress=progress) != said
    ]
    unknown = [name for name in files if name not in recorded]
    source = " and ".join(by)
    if wrong:
        told = f"{', '.join(wrong[:SHOWN])}: not what {source} recorded"
        remedy = _OTHER if any(name in asked for name in wrong) else _AGAIN
        return Finding("checksums", "fail", told, remedy)
    if not unknown:
        return Finding("checksums", "ok", f"{len(recorded)} files are what {source} recorded")
    if record:
        return _record(files, progress)
    told = f"nothing is recorded for {', '.join(unknown[:SHOWN])}"
    if recorded:
        told += f"; {len(recorded)} files are what {source} recorded"
    return Finding("checksums", "warn", told, "--record writes SHA256SUMS, to be compared later")


def _record(files: Mapping[str, Path], progress: Progress | None) -> Finding:
    """Raises OSError."""
    folders = {file.parent for file in files.values()}
    for folder in folders:
        own = [file for file in files.values() if file.parent == folder]
        sums = {file.name: checksums.checksum(file, progress=progress) for file in own}
        checksums.write_sums(folder, {**checksums.read_sums(folder), **sums})
    where = ", ".join(str(folder / checksums.NAME) for folder in sorted(folders))
    return Finding("checksums", "ok", f"recorded {len(files)} files in {where}")


def _tensors(opened: OpenedModel) -> Finding:
    plan = opened.plan
    rest = f"; {len(plan.ignored)} more aren't needed" if plan.ignored else ""
    return Finding(
        "tensors",
        "ok",
        f"{len(plan.tensors)} tensors, {plan.num_elements / 1e6:,.1f} M numbers: names and shapes are "
        f"{opened.config.family}'s{rest}",
    )


def _values(opened: OpenedModel, progress: Progress | None) -> Finding:
    """Raises CheckpointError."""
    nonfinite, fingerprint = check_values(opened.plan, opened.files, progress)
    if nonfinite:
        more = f" and {len(nonfinite) - SHOWN} more" if len(nonfinite) > SHOWN else ""
        told = f"NaN or infinite: {', '.join(nonfinite[:SHOWN])}{more}"
        return Finding("values", "fail", told, _AGAIN)
    return Finding("values", "ok", f"all are finite; fingerprint {fingerprint}")


def _kv_scales(opened: OpenedModel) -> Finding:
    layers = opened.config.text.n_layers
    try:
        scales = kv_scales.read(opened.plan, opened.files, layers)
    except CheckpointError as error:
        return Finding("KV scales", "fail", str(error), _AGAIN)
    if some := kv_scales.incomplete(opened.plan, layers):
        told = "not used unless --kv-cache-dtype is fp8, which takes 1 for the others"
        return Finding("KV scales", "warn", some, told)
    found = [scale for pair in scales for scale in pair]
    return Finding("KV scales", "ok", f"all {layers} layers': {min(found):g} to {max(found):g}")
