"""What a piece of a run needs, to run again in another process: where its code was, and what it was run with."""

from __future__ import annotations

import importlib.metadata
import os
import sys
import sysconfig
from dataclasses import dataclass

from apache_beam.internal import pickler

from luminosity.errors import ReplayError

_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})


@dataclass(frozen=True)
class Surroundings:
    python: str
    luminosity: str
    script: str  # "" in a notebook or a shell
    working_directory: str
    import_path: list[str]  # without the libraries'
    modules: dict[str, str]  # what was imported, by the name's first part, and from which file
    pickle_library: str

    @classmethod
    def here(cls, pickle_library: str) -> Surroundings:
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
        """Make importable here what was importable there."""
        if self.python != _python():
            raise ReplayError(f"it was saved by Python {self.python}, whose code Python {_python()} can't run")
        sys.path[:0] = [path for path in self.import_path if path not in sys.path]
        pickler.set_library(self.pickle_library)

    def explain_missing(self, error: ModuleNotFoundError) -> str:
        """Where a module that is not found here was found there."""
        name = error.name or ""
        home = self.modules.get(name.split(".")[0])
        return f"module {name!r} is not found here; " + (
            f"the run had {name.split('.')[0]!r} from {home}"
            if home
            else f"the run could import from {', '.join(self.import_path)}"
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
