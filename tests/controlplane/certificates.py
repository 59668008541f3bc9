"""Certificates for a control plane that lives for a test run: one authority, and what it signs."""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_DAYS: Final = 30
SERVICE_ADDRESS: Final = "10.0.0.1"
"""Where pods would find the API server: the first address of the service range."""
SERVER_NAMES: Final = ("localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc")


@dataclass(frozen=True, slots=True)
class Pair:
    """A certificate and its key, as PEM files."""

    certificate: Path
    key: Path


class Authority:
    """A certificate authority that keeps its key in memory, and writes what it signs into one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name("migd control plane")
        made = self._draft(self._name, self._key.public_key()).add_extension(
            x509.BasicConstraints(ca=True, path_length=0), critical=True
        )
        made = made.add_extension(_usage(signs=True), critical=True)
        self.certificate = folder / "ca.crt"
        self.certificate.write_bytes(made.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))

    def server(self, file: str, addresses: Sequence[str] = ("127.0.0.1", SERVICE_ADDRESS)) -> Pair:
        """A serving certificate for these addresses and the API server's names."""
        names: list[x509.GeneralName] = [x509.DNSName(name) for name in SERVER_NAMES]
        names += [x509.IPAddress(ipaddress.ip_address(address)) for address in addresses]
        return self._signed(file, _name(file), ExtendedKeyUsageOID.SERVER_AUTH, x509.SubjectAlternativeName(names))

    def client(self, file: str, user: str, groups: Sequence[str] = ()) -> Pair:
        """A client certificate: the API server takes its common name for the user, its organizations for groups."""
        return self._signed(file, _name(user, groups), ExtendedKeyUsageOID.CLIENT_AUTH, None)

    def _signed(
        self,
        file: str,
        subject: x509.Name,
        use: x509.ObjectIdentifier,
        names: x509.SubjectAlternativeName | None,
    ) -> Pair:
        key = ec.generate_private_key(ec.SECP256R1())
        made = self._draft(subject, key.public_key())
        made = made.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        made = made.add_extension(_usage(signs=False), critical=True)
        made = made.add_extension(x509.ExtendedKeyUsage([use]), critical=False)
        if names is not None:
            made = made.add_extension(names, critical=False)
        pair = Pair(self._folder / f"{file}.crt", self._folder / f"{file}.key")
        pair.certificate.write_bytes(made.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
        write_key(pair.key, key)
        return pair

    def _draft(self, subject: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(minutes=5))
            .not_valid_after(now + datetime.timedelta(days=_DAYS))
            # strict verifiers (Python 3.13's default) want both key identifiers
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
        )


def signing_key(folder: Path) -> Pair:
    """The pair that ServiceAccount tokens are signed with; its "certificate" is the public key."""
    key = ec.generate_private_key(ec.SECP256R1())
    pair = Pair(folder / "service-accounts.pub", folder / "service-accounts.key")
    pair.certificate.write_bytes(
        key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    )
    write_key(pair.key, key)
    return pair


def write_key(path: Path, key: ec.EllipticCurvePrivateKey) -> None:
    """A private key as PEM, readable by its owner only."""
    path.touch(mode=0o600)
    path.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )


def _name(common: str, organizations: Sequence[str] = ()) -> x509.Name:
    parts = [x509.NameAttribute(NameOID.ORGANIZATION_NAME, o) for o in organizations]
    return x509.Name([*parts, x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _usage(signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs,
        crl_sign=signs,
        encipher_only=False,
        decipher_only=False,
    )
