"""The surroundings of a run that a replay needs: its Python, its import path and its modules."""

from __future__ import annotations

import importlib.metadata
import os
import sys
import sysconfig
from dataclasses import dataclass

from apache_beam.internal import pickler

from luminosity.errors import ReplayError

__all__ = ["Surroundings"]


_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})


@dataclass(frozen=True)
class Surroundings:
    """The location of a run's code, and the versions that ran it."""

    python: str  # version
    luminosity: str  # version
    script: str  # empty in a notebook or a shell
    working_directory: str
    import_path: list[str]  # without the folders of installed libraries
    modules: dict[str, str]  # files of the top-level modules that were imported, by name
    pickle_library: str

    @classmethod
    def here(cls, pickle_library: str) -> Surroundings:
        """Return the surroundings of this process."""
        script = getattr(sys.modules["__main__"], "__file__", None) or ""
        folders = [os.path.dirname(os.path.abspath(script))] if script else []
        folders += [os.getcwd(), *map(os.path.abspath, sys.path)]
        return cls(
            python=_python(),
            luminosity=importlib.metadata.version("luminosity"),
            script=os.path.abspath(script) if script else "",
            working_directory=os.getcwd(),
            import_path=[p for p in dict.fromkeys(folders) if not p.startswith(_LIBRARIES) and os.path.exists(p)],
            modules=_modules(),
            pickle_library=pickle_library,
        )

    def restore(self) -> None:
        """Make the run's modules importable in this process. Raises :class:`ReplayError` for another Python."""
        if self.python != _python():
            raise ReplayError(
                f"found a file saved by Python {self.python}, expected Python {_python()}",
                fix=f"replay it with Python {self.python}",
            )
        sys.path[:0] = [path for path in self.import_path if path not in sys.path]
        pickler.set_library(self.pickle_library)

    def explain_missing(self, error: ModuleNotFoundError) -> str:
        """Return where the run found a module that is not found here."""
        name = error.name or ""
        home = self.modules.get(name.split(".")[0])
        return f"module {name!r} is not found here; " + (
            f"the run imported {name.split('.')[0]!r} from {home}"
            if home
            else f"the run imported modules from {', '.join(self.import_path)}"
        )


def _python() -> str:
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def _modules() -> dict[str, str]:
    files = {name: getattr(module, "__file__", None) for name, module in list(sys.modules.items()) if "." not in name}
    return {
        name: os.path.abspath(file)
        for name, file in files.items()
        if file and name != "__main__" and name not in sys.stdlib_module_names
    }
