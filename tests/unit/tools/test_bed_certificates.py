"""Certificates made by the real `openssl`."""

from __future__ import annotations

import json
import shutil
import ssl
import subprocess
from pathlib import Path

import pytest

from tools.bed import certificates
from tools.bed.layout import Bed

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not on this machine")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Bed:
    bed = Bed(index=0, folder=tmp_path_factory.mktemp("bed"))
    certificates.provide(bed)
    return bed


def openssl(*arguments: str) -> str:
    done = subprocess.run(["openssl", *arguments], capture_output=True, text=True, check=True, timeout=30)
    return done.stdout


def test_every_certificate_is_signed_by_the_authority_for_what_it_does(made: Bed) -> None:
    for one in certificates.certificates(made):
        for purpose in ("sslclient", *(["sslserver"] if one.names else [])):
            path = str(made.pki / f"{one.name}.crt")
            assert "OK" in openssl("verify", "-purpose", purpose, "-CAfile", str(made.pki / "ca.crt"), path)


def test_a_client_certificate_says_who_it_is(made: Bed) -> None:
    subject = openssl("x509", "-in", str(made.pki / "kubelet.crt"), "-noout", "-subject", "-nameopt", "RFC2253")
    assert subject.strip() == "subject=CN=system:node:bed-0,O=system:nodes"


def test_the_api_server_may_be_asked_at_every_address_that_reaches_it(made: Bed) -> None:
    names = openssl("x509", "-in", str(made.pki / "apiserver.crt"), "-noout", "-ext", "subjectAltName")
    for address in (made.address, made.api_service, made.link_address, "127.0.0.1"):
        assert f"IP Address:{address}" in names
    assert "DNS:kubernetes.default.svc" in names


def test_a_certificate_without_names_is_no_servers(made: Bed) -> None:
    assert "serverAuth" not in certificates.extensions(())
    text = openssl("x509", "-in", str(made.pki / "admin.crt"), "-noout", "-text")
    assert "CA:FALSE" in text
    assert "TLS Web Server Authentication" not in text


def test_the_kubeconfig_holds_all_it_needs_and_only_its_owner_reads_it(made: Bed) -> None:
    document = json.loads(made.kubeconfig.read_text())
    assert document["current-context"] == "bed"
    assert document["clusters"][0]["cluster"]["server"] == "https://10.201.0.2:6443"
    assert set(document["users"][0]["user"]) == {"client-certificate-data", "client-key-data"}
    assert made.kubeconfig.stat().st_mode & 0o077 == 0
    assert all(path.stat().st_mode & 0o077 == 0 for path in made.pki.glob("*.key"))


def test_python_loads_what_was_made(made: Bed) -> None:
    context = ssl.create_default_context(cafile=f"{made.pki / 'ca.crt'}")
    context.load_cert_chain(made.pki / "admin.crt", made.pki / "admin.key")
    assert context.cert_store_stats()["x509_ca"] == 1


def test_a_second_call_keeps_them_and_another_description_makes_new_ones(tmp_path: Path) -> None:
    bed = Bed(index=0, folder=tmp_path)
    certificates.provide(bed)
    before = (bed.pki / "ca.crt").read_bytes()
    certificates.provide(bed)
    assert (bed.pki / "ca.crt").read_bytes() == before
    other = Bed(index=1, folder=tmp_path)
    assert not certificates.current(other)
    certificates.provide(other)
    assert (bed.pki / "ca.crt").read_bytes() != before
    assert json.loads(other.kubeconfig.read_text())["current-context"] == "bed-1"


def test_a_call_that_was_killed_before_the_kubeconfig_is_repeated(tmp_path: Path) -> None:
    bed = Bed(index=0, folder=tmp_path)
    certificates.provide(bed)
    bed.kubeconfig.unlink()
    certificates.provide(bed)
    assert bed.kubeconfig.is_file()
