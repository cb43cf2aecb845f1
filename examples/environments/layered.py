"""Makes a virtual environment on top of this one: other versions of some libraries, the same of all others."""

from __future__ import annotations

import shutil
import sys
import sysconfig
import venv
from pathlib import Path


def make_environment(folder: Path, library: Path, version: str) -> Path:
    """Make a virtual environment in ``folder`` whose own library is the module in the folder ``library``.

    Does what ``pip install`` does with a wheel, but needs no network. The other libraries are those of this process: a
    ``.pth`` file names their folders, which Python searches after the environment's own.
    """
    venv.EnvBuilder(symlinks=True).create(folder)
    python = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = folder / "lib" / python / "site-packages"
    (module,) = library.glob("*.py")
    shutil.copy(module, packages)
    information = packages / f"{module.stem}-{version}.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module.stem}\nVersion: {version}\n")
    shared = dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib"))
    (packages / "shared.pth").write_text("\n".join(shared) + "\n")
    return folder
