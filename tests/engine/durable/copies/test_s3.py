"""Tests of a copy in S3, with a server of moto."""

from __future__ import annotations

import importlib
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from apache_beam.io.aws.clients.s3 import boto3_client
from apache_beam.io.filesystems import FileSystems
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.runners.runner import PipelineState

from luminosity.beam_fixes import kept_s3_clients
from luminosity.engine.data.world import THIS_MACHINE
from luminosity.engine.durable.copies import shipper
from luminosity.engine.durable.copies.lease import Lease
from luminosity.engine.durable.copies.places import place_at
from luminosity.errors import CopyError
from tests.engine.durable.copies.test_shipping import Copied, everything, restored
from tests.engine.durable.test_ends import counting, wait_for_numbers
from tests.marks import notes
from tests.runners import IS_REFERENCE, finished, start

pytestmark = pytest.mark.skipif(IS_REFERENCE, reason="tests what only the engine does")

PACKAGES = Path(sys.prefix) / "s3"  # where `make setup` puts a server of S3 and the client that Beam uses
_LONGEST_S = 60.0
_KEY = "testing"  # moto takes any
_SERVER = """
import sys
sys.path.append({})
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
server.stop()
"""


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    """Yield the address of an S3 server with an empty bucket."""
    assert (PACKAGES / "moto").is_dir(), f"{PACKAGES} has no packages: run make setup"
    with subprocess.Popen(
        [sys.executable, "-c", _SERVER.format(repr(str(PACKAGES)))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as server:
        try:
            assert server.stdout is not None
            address = f"http://127.0.0.1:{int(server.stdout.readline())}"
            request = urllib.request.Request(f"{address}/bucket", method="PUT")
            request.add_header("Authorization", "AWS4-HMAC-SHA256 Credential=a/20260101/us-east-1/s3/aws4_request")
            urllib.request.urlopen(request, timeout=_LONGEST_S).close()
            yield address
        finally:
            server.kill()


@pytest.fixture
def options(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Yield the options that lead Beam to the server, for the pipelines and the places of a test."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(PACKAGES)])
    monkeypatch.setattr(boto3_client, "boto3", importlib.import_module("boto3"))  # Beam has looked for it too early.
    given = [f"--s3_endpoint_url={endpoint}", f"--s3_access_key_id={_KEY}", f"--s3_secret_access_key={_KEY}"]
    given += ["--s3_region_name=us-east-1"]
    FileSystems.set_options(PipelineOptions(given))
    yield given
    FileSystems.set_options(PipelineOptions([]))


def test_a_copy_in_s3(options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shipper, "_SHIP_S", 0.001)
    monkeypatch.setattr(shipper, "_MOST_SEGMENTS", 3)
    copied = Copied(tmp_path, place_at("s3://bucket/folder/copy"))
    try:
        copied.write(20)
        ship = copied.ship()
        for _ in range(8):
            copied.write(5)
            assert ship.finish(_LONGEST_S)
            assert restored(copied.place, tmp_path / "fresh") == everything(copied.folder)
        names = copied.place.names()
        assert len([name for name in names if name.startswith("manifest-")]) == 1
        assert len([name for name in names if name.startswith("segment-")]) <= 4
        copied.place.remove(names)
        assert copied.place.names() <= {"lease.json"}  # it may have been renewed since
        copied.place.remove(names)  # they are gone already
    finally:
        copied.close()


def test_one_client_serves_all_calls(options: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []
    session = boto3_client.boto3.session.Session

    def counted(*given: object) -> object:
        made.append(given)
        return session(*given)

    monkeypatch.setattr(boto3_client.boto3.session, "Session", counted)
    monkeypatch.setattr(kept_s3_clients, "_clients", {})
    place = place_at("s3://bucket/one")
    place.write("a", [b"first"])
    place.write("b", [b"second"])
    assert [b"".join(place.read(name) or ()) for name in "ab"] == [b"first", b"second"]
    assert place.names() == {"a", "b"}
    assert len(made) == 1


def test_a_bucket_that_is_missing(options: list[str]) -> None:
    with pytest.raises(CopyError, match="s3://nowhere/copy can't be reached: "):
        Lease(place_at("s3://nowhere/copy"), "f00", 60.0, THIS_MACHINE)


def test_a_run_continues_from_s3_after_its_folder_is_lost(options: list[str], tmp_path: Path) -> None:
    copy = "s3://bucket/run"
    both = [f"--checkpoint_copy={copy}", f"--restore_from={copy}", *options]
    for machine in ("one", "two", "three"):
        result = start(counting(tmp_path), f"--checkpoint_dir={tmp_path / machine}", *both)
        wait_for_numbers(tmp_path, more_than=len(notes(tmp_path / "numbers")) + 20)
        assert result.cancel() == PipelineState.STOPPED
        finished(result)
        shutil.rmtree(tmp_path / machine)
    numbers = [int(number) for number in notes(tmp_path / "numbers")]
    assert numbers == list(range(len(numbers)))
