"""Certificates made for the test run: an authority, and pairs that it signs."""

import itertools
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from kestrel_grpc.settings.security import TlsFiles

_NUMBERS = itertools.count(1)


def _openssl(*arguments: object) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)


@dataclass(frozen=True)
class Pair:
    cert: Path
    key: Path

    def tls(self, **more: object) -> TlsFiles:
        """The files of a server that shows the certificate."""
        files = {"certificate": self.cert, "private_key": self.key, **more}
        return TlsFiles(**{name: str(file) for name, file in files.items() if file is not None})


@dataclass(frozen=True)
class Authority:
    """``issue`` signs a new pair of files."""

    folder: Path
    ca: Pair

    def issue(self, name: str, names: str = "DNS:localhost,IP:127.0.0.1") -> Pair:
        stem = self.folder / f"{next(_NUMBERS)}"
        cert, key = stem.with_suffix(".pem"), stem.with_suffix(".key")
        new_key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
        _openssl(
            *("req", "-x509", *new_key, "-days", 2, "-subj", f"/CN={name}"),
            *("-CA", self.ca.cert, "-CAkey", self.ca.key, "-keyout", key, "-out", cert),
            *(("-addext", f"subjectAltName={names}") if names else ()),
            *("-addext", "basicConstraints=critical,CA:FALSE"),
        )
        return Pair(cert, key)


def make_authority(folder: Path) -> Authority:
    pair = Pair(folder / "ca.pem", folder / "ca.key")
    new_key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    _openssl(
        *("req", "-x509", *new_key, "-days", 2, "-subj", "/CN=test authority"),
        *("-keyout", pair.key, "-out", pair.cert),
    )
    return Authority(folder, pair)


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return make_authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="session")
def server_pair(authority: Authority) -> Pair:
    return authority.issue("localhost")
