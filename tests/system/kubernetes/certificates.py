"""A certificate authority of a cluster, and what it signs. Written with `openssl`, valid for ten days."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

from tests import tools

_DAYS = "10"
_CALL_S = 30.0


class Authority:
    """Files in `directory`: `ca.crt`, `ca.key`, and NAME.crt and NAME.key of each certificate."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        directory.chmod(0o700)
        _openssl(
            "req",
            "-x509",
            *_new_key(directory / "ca.key"),
            "-subj",
            "/CN=ludus-test-ca",
            "-days",
            _DAYS,
            "-out",
            self.certificate,
        )

    @property
    def certificate(self) -> Path:
        return self.directory / "ca.crt"

    def sign(self, name: str, subject: str, addresses: Sequence[str] = (), dns_names: Sequence[str] = ()) -> tuple[Path, Path]:
        """The certificate and the key of a server and client with that subject, for example `/O=system:masters/CN=admin`."""
        certificate, key = self.directory / f"{name}.crt", self.directory / f"{name}.key"
        names = ",".join([*(f"IP:{address}" for address in addresses), *(f"DNS:{it}" for it in dns_names)])
        extensions = ["authorityKeyIdentifier=keyid", "extendedKeyUsage=serverAuth,clientAuth"]
        extensions += [f"subjectAltName={names}"] if names else []
        (self.directory / f"{name}.ext").write_text("\n".join(extensions))
        request = self.directory / f"{name}.csr"
        _openssl("req", *_new_key(key), "-subj", subject, "-out", request)
        _openssl("x509", "-req", "-in", request, "-CA", self.certificate, "-CAkey", self.directory / "ca.key", "-CAcreateserial",
                 "-days", _DAYS, "-extfile", self.directory / f"{name}.ext", "-out", certificate)  # fmt: skip
        return certificate, key


def _new_key(path: Path) -> list[str | Path]:
    return ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-keyout", path]


def _openssl(*words: str | Path) -> None:
    subprocess.run([tools.need("openssl"), *words], check=True, timeout=_CALL_S, capture_output=True)
