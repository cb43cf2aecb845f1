"""What a run makes to keep strangers out, and what of it may be seen."""

from __future__ import annotations

import pickle
from dataclasses import asdict

import pytest
from cryptography import x509

from luminosity.engine.cluster.security import RunSecurity, WorkerAccess
from luminosity.engine.cluster.worker.local_paths import LocalPaths
from luminosity.engine.cluster.worker.node_worker import NodeWorker


def test_each_run_has_its_own_certificate_and_each_worker_its_own_token() -> None:
    one, other = RunSecurity.create(), RunSecurity.create()
    assert one.certificate != other.certificate
    tokens = {one.token("a"), one.token("b"), other.token("a"), other.token("b")}
    assert len(tokens) == 4
    assert one.is_token("a", one.token("a"))
    assert not any(one.is_token("a", token) for token in tokens - {one.token("a")})
    assert not any(one.is_token("a", token) for token in ("", "é", "\udcff", one.token("a")[:-1]))


def test_the_certificate_is_for_one_name_and_for_clocks_that_differ() -> None:
    certificate = x509.load_pem_x509_certificate(RunSecurity.create().certificate.encode())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["luminosity"]
    days = (certificate.not_valid_after_utc - certificate.not_valid_before_utc).days
    assert days > 365


def test_a_worker_carries_the_access_and_shows_no_token() -> None:
    security = RunSecurity.create()
    access = security.access("w")
    worker = NodeWorker(asdict(access), LocalPaths("/home/me/project"), [])
    read = pickle.loads(pickle.dumps(worker))
    assert read == worker
    assert WorkerAccess(**read.access) == access
    shown = f"{access!r}{access}{worker!r}{worker}{security!r}{vars(type(security))!r}"
    assert access.token not in shown


def test_the_key_is_not_pickled_by_mistake() -> None:
    with pytest.raises(TypeError, match=r"RunSecurity\.access"):
        pickle.dumps({"worker": RunSecurity.create()})
