"""What workers of Beam's suites import."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

# The last one reads the transcripts of its tests, which takes as long as all else.
_IMPORTED_AHEAD = ("hamcrest", "mock", "parameterized", "tenacity", "apache_beam.transforms.trigger_test")


@pytest.fixture(scope="session", autouse=True)
def suites_imported_ahead(imported_ahead: None) -> Iterator[None]:
    """Let the fork server import what each worker would import with Beam's own files of tests."""
    from luminosity.engine import assemble

    find = assemble.modules_to_preload
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assemble, "modules_to_preload", lambda: [*find(), *_IMPORTED_AHEAD])
        yield
