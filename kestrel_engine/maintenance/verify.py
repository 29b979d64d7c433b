"""Are a model's files what they should be? Checksums, names and shapes, values. Known answers: known_answers.py."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ..checkpoint import checksums
from ..checkpoint.loader import check_values
from ..checkpoint.open import OpenedModel, open_model
from ..checkpoint.plan import SHOWN, checkpoint_error
from ..config import RuntimeConfig
from ..errors import CheckpointError, KestrelError
from .download import named_files
from .finding import Finding

if TYPE_CHECKING:
    from ..checkpoint.hub import Hub
    from ..checkpoint.progress import Progress

_AGAIN = "delete the file and download it again (kestrel-grpc download)"


def verify(
    config: RuntimeConfig,
    *,
    hub: Hub | None = None,
    record: bool = False,
    progress: Progress | None = None,
) -> Iterator[Finding]:
    """One finding for each check, as it is done. Reads every byte twice: for checksums, and as numbers."""
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
        yield _checksums(files, record, progress)
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


def _checksums(files: Mapping[str, Path], record: bool, progress: Progress | None) -> Finding:
    """Raises CheckpointError, OSError."""
    recorded: dict[str, str] = {}
    by: dict[str, None] = {}
    for name, file in files.items():
        if (said := checksums.recorded_by_hub(file)) is not None:
            recorded[name] = said
            by["the hub"] = None
        elif (said := checksums.read_sums(file.parent).get(file.name)) is not None:
            recorded[name] = said
            by[checksums.NAME] = None
    wrong = [
        name
        for name, said in recorded.items()
        if checksums.checksum(files[name], like=said, progress=progress) != said
    ]
    unknown = [name for name in files if name not in recorded]
    source = " and ".join(by)
    if wrong:
        told = f"{', '.join(wrong[:SHOWN])}: not what {source} recorded"
        return Finding("checksums", "fail", told, _AGAIN)
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
