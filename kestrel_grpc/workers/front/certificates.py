"""RenewedCertificates: tells Envoy which files hold the certificates, again whenever they change.

Envoy reads files again if its configuration names others. So each change makes new symbolic links. Keys stay where they
are. As in the servers' own listeners (security/identity/tls.py), the old certificates stay in use if the new ones are
invalid.
"""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

from ...security.files import WatchedFiles
from ...security.identity.tls_files import TlsError, server_context, watched_paths
from ...settings.security import TlsFiles
from .bootstrap import secrets

logger = logging.getLogger(__name__)


class RenewedCertificates:
    """The files of secrets in ``folder``. Raises TlsError if the files are invalid now."""

    def __init__(self, files: TlsFiles, folder: Path) -> None:
        self._files, self._folder = files, folder
        self._watched = WatchedFiles(watched_paths(files))
        self._watched.changed()
        self._version = 0
        self._write()

    def renew(self) -> None:
        """Checks the files for changes."""
        if self._watched.changed() and self.write():
            logger.info("using the new certificate %s", self._files.certificate)

    def write(self) -> bool:
        """Writes the files of secrets anew. Returns whether the certificates are valid."""
        try:
            self._write()
        except (TlsError, OSError) as error:
            logger.error("keeping the old certificate: %s", error)
            return False
        return True

    def _write(self) -> None:
        server_context(self._files)  # Checks them.
        before, self._version = self._version, self._version + 1
        files = self._files
        ca = None if files.client_ca is None else self._link("ca", files.client_ca)
        found = secrets(
            self._link("certificate", files.certificate), self._link("key", files.private_key), ca
        )
        for name, content in found.items():
            # Envoy notices only files that are moved to their place.
            (new := self._folder / f"{name}.new").write_text(json.dumps(content))
            os.replace(new, self._folder / name)
        for old in self._folder.glob(f"{before - 1}-*"):
            old.unlink()

    def _link(self, name: str, target: str) -> str:
        link = self._folder / f"{self._version}-{name}"
        link.symlink_to(os.path.abspath(target))
        return str(link)
