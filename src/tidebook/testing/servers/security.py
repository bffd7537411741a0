"""Certificates and credentials for servers with TLS and authentication."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

from tidebook.testing.servers.errors import ServerError

DAYS = "30"


@dataclass(frozen=True)
class Credentials:
    """The user and password of a client."""

    user: str = "tidebook"
    password: str = "tide-and-time"


@dataclass(frozen=True)
class Certificates:
    """A certificate authority for one test, and the certificates it signed for 127.0.0.1 and localhost."""

    folder: Path

    @property
    def authority(self) -> Path:
        """Return the authority's certificate, which clients trust."""
        return self.folder / "authority.pem"

    @property
    def server(self) -> Path:
        """Return the server's certificate, which is also valid as a client certificate."""
        return self.folder / "server.pem"

    @property
    def server_key(self) -> Path:
        """Return the server's private key, unencrypted."""
        return self.folder / "server.key"

    @property
    def server_bundle(self) -> Path:
        """Return a PEM file with the key and certificates, as both servers expect it."""
        return self.folder / "server-bundle.pem"

    @property
    def stranger(self) -> Path:
        """Return the certificate of another authority: a client that trusts only it must reject the server."""
        return self.folder / "stranger.pem"

    @property
    def stranger_key(self) -> Path:
        """Return the other authority's private key, for a client that the server must reject."""
        return self.folder / "stranger.key"


@dataclass(frozen=True)
class Security:
    """Requires TLS and a password of every client, and optionally a client certificate signed by the same authority."""

    certificates: Certificates
    credentials: Credentials
    client_certificates: bool = False


def make_security(
    folder: Path, credentials: Credentials | None = None, *, client_certificates: bool = False
) -> Security:
    """Create an authority and a server certificate in a folder, with openssl, unless they exist."""
    certificates = Certificates(folder.resolve())
    if not certificates.server_bundle.exists():
        folder.mkdir(parents=True, exist_ok=True)
        _create(certificates)
    return Security(certificates, credentials or Credentials(), client_certificates)


def _create(certificates: Certificates) -> None:
    folder = certificates.folder
    for name in ("authority", "stranger"):
        _openssl(
            *("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", DAYS),
            *("-subj", f"/CN=Tidebook test {name}"),
            *("-keyout", f"{folder}/{name}.key", "-out", f"{folder}/{name}.pem"),
        )
    (folder / "server.ext").write_text(
        "subjectAltName=IP:127.0.0.1,DNS:localhost\nextendedKeyUsage=serverAuth,clientAuth\n"
    )
    _openssl(
        *("req", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost"),
        *("-keyout", str(certificates.server_key), "-out", f"{folder}/server.csr"),
    )
    _openssl(
        *("x509", "-req", "-in", f"{folder}/server.csr", "-days", DAYS, "-extfile", f"{folder}/server.ext"),
        *("-CA", str(certificates.authority), "-CAkey", f"{folder}/authority.key", "-CAcreateserial"),
        *("-out", str(certificates.server)),
    )
    parts = (certificates.server_key, certificates.server, certificates.authority)
    certificates.server_bundle.write_text("".join(part.read_text() for part in parts))


def _openssl(*arguments: str) -> None:
    try:
        done = subprocess.run(["openssl", *arguments], capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise ServerError("openssl is needed to make certificates, and is not on PATH") from error
    if done.returncode != 0:
        raise ServerError(f"openssl {arguments[0]} failed:\n{done.stderr}")
