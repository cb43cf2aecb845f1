"""What keeps strangers out of a run whose workers connect by TCP: a certificate and a secret, both made for this run.

Imports neither Beam nor gRPC: worker requests refer to this module, and the fork server reads them before it imports
Beam.
"""

from __future__ import annotations

import datetime
import hashlib
import hmac
import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from luminosity.extras import require

if TYPE_CHECKING:
    import grpc

__all__ = ["SERVER_NAME", "TOKEN_KEY", "TOKEN_PREFIX", "RunSecurity", "WorkerAccess"]

SERVER_NAME = "luminosity"  # the certificate's name; clients expect it whatever address the runner has
TOKEN_KEY = "authorization"  # in the metadata of each call: tools that trace calls know that it is secret
TOKEN_PREFIX = "Bearer "

_SECRET_BYTES = 32  # as long as the digest of SHA-256
_CLOCK_SKEW = datetime.timedelta(days=1)  # a node's clock may be behind that of the runner's machine
# A stream may run for years and replace workers all the time. The key never leaves the runner's memory, so an early
# end would protect nothing.
_VALIDITY = datetime.timedelta(days=3650)


@dataclass(frozen=True)
class WorkerAccess:
    """What one worker needs to connect: the runner's certificate, and the worker's own token."""

    certificate: str  # PEM; the only one that the worker trusts
    token: str = field(repr=False)


class RunSecurity:
    """The certificate, its private key and the secret of one run. Key and secret stay in the runner's process."""

    def __init__(self, certificate: str, key: bytes, secret: bytes) -> None:
        """Use :meth:`create`."""
        self.certificate = certificate
        self._key = key
        self._secret = secret

    def __reduce__(self) -> Any:
        """Refuse to be pickled, so that the key does not get to workers by mistake."""
        raise TypeError("found RunSecurity in something to pickle, expected WorkerAccess: use RunSecurity.access()")

    @classmethod
    def create(cls) -> RunSecurity:
        """Make a key, a certificate that it signs itself, and a secret. Takes about a millisecond."""
        x509: Any = require("cryptography.x509", "ray")
        hashes: Any = require("cryptography.hazmat.primitives.hashes", "ray")
        serialization: Any = require("cryptography.hazmat.primitives.serialization", "ray")
        ec: Any = require("cryptography.hazmat.primitives.asymmetric.ec", "ray")
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(x509.oid.NameOID.COMMON_NAME, SERVER_NAME)])
        now = datetime.datetime.now(datetime.timezone.utc)
        certificate = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - _CLOCK_SKEW)
            .not_valid_after(now + _VALIDITY)
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(SERVER_NAME)]), critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .sign(key, hashes.SHA256())
        )
        pem = serialization.Encoding.PEM
        return cls(
            certificate.public_bytes(pem).decode(),
            key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()),
            secrets.token_bytes(_SECRET_BYTES),
        )

    def token(self, worker_id: str) -> str:
        """Return the token of a worker. Tokens of other workers do not follow from it."""
        return hmac.new(self._secret, worker_id.encode(), hashlib.sha256).hexdigest()

    def is_token(self, worker_id: str, token: str) -> bool:
        """Return whether ``token`` is that of the worker. Takes the same time however wrong it is."""
        return hmac.compare_digest(self.token(worker_id).encode(), token.encode(errors="replace"))

    def access(self, worker_id: str) -> WorkerAccess:
        """Return what a worker needs to connect."""
        return WorkerAccess(self.certificate, self.token(worker_id))

    def server_credentials(self) -> grpc.ServerCredentials:
        """Return the credentials for the run's gRPC server."""
        import grpc

        return grpc.ssl_server_credentials([(self._key, self.certificate.encode())])
