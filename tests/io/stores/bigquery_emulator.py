"""Run a Beam script against emulators of BigQuery and Cloud Storage; Beam has no option for the first.

`python bigquery_emulator.py SCRIPT ARGUMENTS...`, in an environment with bqemulator, gcp-storage-emulator and
apache-beam[gcp]. The bucket is `gs://bucket`.
"""

from __future__ import annotations

import contextlib
import glob
import os
import runpy
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.util import find_spec

PROJECT, DATASET, BUCKET = "project", "dataset", "bucket"


@contextlib.contextmanager
def emulator() -> Iterator[tuple[int, int]]:
    """Start the emulator, and return the ports of its REST and gRPC servers."""
    import duckdb

    rest, grpc = _free_port(), _free_port()
    platform = duckdb.connect().execute("PRAGMA platform").fetchall()[0][0]
    with tempfile.TemporaryDirectory() as home:
        # Take DuckDB's extensions from packages instead of downloading them.
        extensions = os.path.join(home, ".duckdb", "extensions", f"v{duckdb.__version__}", platform)
        os.makedirs(extensions)
        for package in ("duckdb_extension_spatial", "duckdb_extension_avro"):
            (folder,) = find_spec(package).submodule_search_locations
            for file in glob.glob(f"{folder}/extensions/*/*"):
                shutil.copy(file, extensions)
        command = ["-m", "bqemulator", "start", f"--rest-port={rest}", f"--grpc-port={grpc}", f"--project={PROJECT}"]
        log = os.path.join(home, "log")
        with open(log, "w") as output:
            process = subprocess.Popen(
                [sys.executable, *command], env={**os.environ, "HOME": home}, stdout=output, stderr=output
            )
        try:
            _wait_for(rest, process, log)
            _wait_for(grpc, process, log)
            yield rest, grpc
        finally:
            process.terminate()
            process.wait(30)


@contextlib.contextmanager
def bucket() -> Iterator[None]:
    """Start an emulator of Cloud Storage with one bucket, in a folder from which the emulator of BigQuery loads."""
    from gcp_storage_emulator.server import create_server
    from gcp_storage_emulator.settings import STORAGE_DIR

    port = _free_port()
    with tempfile.TemporaryDirectory() as folder:
        server = create_server("127.0.0.1", port, in_memory=False, data_dir=folder, default_bucket=BUCKET)
        server.start()
        os.environ["STORAGE_EMULATOR_HOST"] = f"http://127.0.0.1:{port}"
        os.environ["BQEMU_GCS_LOCAL_ROOT"] = os.path.join(folder, STORAGE_DIR)
        try:
            yield
        finally:
            server.stop()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def _wait_for(port: int, process: subprocess.Popen, log: str) -> None:
    give_up_at = time.monotonic() + 90
    while time.monotonic() < give_up_at and process.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.1)
    with open(log) as file:
        sys.exit(f"the emulator does not listen at {port}:\n{file.read()[-2000:]}")


def point_beam_at(rest: int, grpc_port: int) -> None:
    """Let Beam's three clients use the emulator, with a fake key."""
    os.environ["BIGQUERY_EMULATOR_HOST"] = f"http://127.0.0.1:{rest}"
    os.environ["GOOGLE_CLOUD_PROJECT"] = PROJECT
    import google.auth
    import grpc
    from apache_beam.io.gcp import bigquery
    from apache_beam.io.gcp.internal.clients import bigquery as rest_clients
    from google.auth.credentials import AnonymousCredentials
    from google.cloud.bigquery_storage_v1.services.big_query_read.transports import BigQueryReadGrpcTransport

    google.auth.default = lambda *_, **__: (AnonymousCredentials(), PROJECT)
    rest_clients.BigqueryV2.BASE_URL = f"http://127.0.0.1:{rest}/bigquery/v2/"
    reader = bigquery.bq_storage.BigQueryReadClient
    bigquery.bq_storage.BigQueryReadClient = lambda **_: reader(
        transport=BigQueryReadGrpcTransport(channel=grpc.insecure_channel(f"127.0.0.1:{grpc_port}"))
    )


def main() -> None:
    with bucket(), emulator() as (rest, grpc):
        point_beam_at(rest, grpc)
        from google.cloud import bigquery

        bigquery.Client(project=PROJECT).create_dataset(DATASET)
        # In this process, in which Beam's clients know the emulator.
        runner = ["--runner=luminosity.LuminosityRunner", "--debug", "--progress=off", "--run_dir=off"]
        sys.argv = [*sys.argv[1:], "--no_auth", f"--project={PROJECT}", *runner]
        sys.path.insert(0, os.path.dirname(sys.argv[0]))
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
