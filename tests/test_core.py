"""The limits of control groups, in files as the kernel has them."""

from __future__ import annotations

from pathlib import Path

import pytest

from luminosity import core


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The control groups of a machine on which this process is a service of systemd."""
    (tmp_path / "own").write_text("0::/system.slice/stream.service\n")
    unit = tmp_path / "groups" / "system.slice" / "stream.service"
    unit.mkdir(parents=True)
    monkeypatch.setattr(core, "_OWN_GROUPS", str(tmp_path / "own"))
    monkeypatch.setattr(core, "_CONTROL_GROUPS", str(tmp_path / "groups"))
    return unit


def test_the_limits_of_a_service_count(groups: Path) -> None:
    (groups / "cpu.max").write_text("100000 100000\n")
    (groups / "memory.max").write_text("1000000\n")
    (groups.parent / "memory.max").write_text("max\n")
    assert (core.usable_cores(), core.machine_ram_bytes()) == (1, 1_000_000)


def test_the_least_limit_of_all_groups_counts(groups: Path) -> None:
    (groups / "memory.max").write_text("max\n")
    (groups / "memory.high").write_text("900000\n")
    (groups.parent / "memory.max").write_text("800000\n")
    (groups.parent.parent / "cpu.max").write_text("50000 100000\n")
    assert (core.usable_cores(), core.machine_ram_bytes()) == (1, 800_000)


def test_a_container_has_the_limits_of_its_root(groups: Path) -> None:
    """The path of its own group is one outside of the container: there is no such folder."""
    Path(core._OWN_GROUPS).write_text("0::/../../elsewhere\n")  # pyright: ignore[reportPrivateUsage]
    (groups.parent.parent / "memory.max").write_text("700000\n")
    assert core.machine_ram_bytes() == 700_000


def test_without_control_groups_the_machine_is_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = core.machine_ram_bytes()
    monkeypatch.setattr(core, "_OWN_GROUPS", str(tmp_path / "none"))
    monkeypatch.setattr(core, "_CONTROL_GROUPS", str(tmp_path))
    assert core.machine_ram_bytes() >= whole
    assert core.usable_cores() >= 1
