"""A certificate for a server of the tests, which signs itself."""

from __future__ import annotations

import datetime
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_pem_private_key, pkcs12


def certificate_for(directory: Path, address: str) -> tuple[Path, Path]:
    """Return a file with key and certificate, as servers take them, and one with the certificate."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "server")])
    builder = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
    alternatives = x509.SubjectAlternativeName(
        [x509.IPAddress(ipaddress.ip_address(address)), x509.DNSName("localhost")]
    )
    builder = builder.add_extension(alternatives, critical=False)
    builder = builder.not_valid_before(datetime.datetime(2020, 1, 1)).not_valid_after(datetime.datetime(2120, 1, 1))
    certificate = builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    (directory / "keys.pem").write_bytes(private + certificate)
    (directory / "ca.pem").write_bytes(certificate)
    return directory / "keys.pem", directory / "ca.pem"


def java_stores(directory: Path, password: str) -> tuple[Path, Path]:
    """Return stores for Java: one with what ``certificate_for`` made, and one that trusts it."""
    keys = (directory / "keys.pem").read_bytes()
    key, certificate = load_pem_private_key(keys, None), x509.load_pem_x509_certificate(keys)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    encryption = serialization.BestAvailableEncryption(password.encode())
    own, trusted = directory / "keys.p12", directory / "trusted.p12"
    own.write_bytes(pkcs12.serialize_key_and_certificates(b"server", key, certificate, None, encryption))
    known = [pkcs12.PKCS12Certificate(certificate, b"server")]
    trusted.write_bytes(pkcs12.serialize_java_truststore(known, encryption))
    return own, trusted
