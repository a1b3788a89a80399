"""A certificate authority of a test's own, by the real openssl.

Owns keys and certificates in one folder. Refuses to judge them.
"""

import subprocess
from pathlib import Path

CURVE = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
HERE = "DNS:localhost,IP:127.0.0.1,IP:::1"


class Authority:
    """Signs what it is asked to."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self._folder, self._name = folder, name
        self.certificate, self._key = folder / f"{name}.pem", folder / f"{name}.key"
        openssl("req", "-x509", *CURVE, "-keyout", f"{self._key}", "-out", f"{self.certificate}", "-days", "2",
                "-subj", f"/CN={name}")  # fmt: skip

    def issue(self, name: str, names: str = HERE) -> tuple[Path, Path]:
        """Certificate and key for the alternative names."""
        certificate, key, request = (self._folder / f"{name}.{end}" for end in ("crt", "key", "csr"))
        openssl("req", *CURVE, "-keyout", f"{key}", "-out", f"{request}", "-subj", f"/CN={name}")
        (self._folder / f"{name}.names").write_text(f"subjectAltName={names}\n")
        openssl("x509", "-req", "-in", f"{request}", "-CA", f"{self.certificate}", "-CAkey", f"{self._key}",
                "-CAcreateserial", "-extfile", f"{self._folder / f'{name}.names'}", "-days", "2",
                "-out", f"{certificate}")  # fmt: skip
        return certificate, key


def openssl(*words: str) -> str:
    """What it says on standard output."""
    return subprocess.run(["openssl", *words], check=True, capture_output=True, text=True).stdout
