"""Faster imports of Beam: without garbage collection, and without libraries that most pipelines do not use.

``import apache_beam`` imports pandas, pymongo, requests and others, which is half of its time. Here these imports wait
until something uses them:

* A package of Beam that copies all names of a module into itself gets those of :data:`_PARTS` when one is asked for.
* A module of Beam that uses a library only in its functions gets a stand-in for it. With its first use, the library
  is imported and takes the place of the stand-in.

Only import statements at the top of the modules named here are affected, while these modules are run. Neither
``sys.modules`` nor an import of anybody else ever yields a stand-in. What a program has imported already, and what is
not installed, is imported as ever.
"""

from __future__ import annotations

import builtins
import gc
import importlib
import re
import resource
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, cast

__all__ = ["collect_seldom", "import_beam", "install"]

Run = Callable[[ModuleType, Callable[[ModuleType], None]], None]  # gets a module, and what runs its code

_IO, _TYPES = "apache_beam.io", "apache_beam.typehints"
_INFERENCE = "apache_beam.ml.inference.base"
_BIGQUERY = f"{_IO}.gcp.bigquery"
# Modules whose names a package copies, with the library for whose types they are, if anything depends on it.
_PARTS: Mapping[str, Mapping[str, str]] = {
    _IO: {
        f"{_IO}.avroio": "",
        f"{_IO}.mongodbio": "",
        f"{_IO}.parquetio": "",
        _BIGQUERY: "",
        f"{_IO}.gcp.pubsub": "",
    },
    _TYPES: {f"{_TYPES}.pandas_type_compatibility": "pandas", f"{_TYPES}.arrow_type_compatibility": "pyarrow"},
}
_MISSING_WITHOUT_CLOUD = (_BIGQUERY, f"{_IO}.gcp.pubsub")  # Beam goes on if they can't be imported
_TEXT = f"{_IO}.textio"  # uses pandas at its top, but only to copy from its documentation
_LIBRARIES: Mapping[str, Sequence[str]] = {
    "apache_beam.internal.http_client": ("httplib2",),
    "apache_beam.ml.transforms.base": ("jsonpickle",),
    f"{_IO}.gcp.gce_metadata_util": ("requests",),
    _TEXT: ("pandas",),
    "apache_beam.transforms.external": ("yaml",),
    "apache_beam.transforms.managed": ("yaml",),
    "apache_beam.transforms.util": ("cryptography.fernet",),
    _TYPES: ("pandas", "pyarrow"),
    f"{_TYPES}.typehints": ("beartype.door", "beartype.roar"),
}
# Beam imports it, and with it torch, only if it can; and again when it is used. Torch takes 2 s and 200 MB.
_REFUSED = {_INFERENCE: "apache_beam.ml.inference.model_manager"}
_ALL = re.compile(r"^__all__ = \[(.*?)\]", re.DOTALL | re.MULTILINE)
_QUOTED = re.compile(r"""["'](\w+)["']""")

# Frozen objects no longer count as long-lived. With Python's own thresholds a worker would then search its whole heap
# after every few thousand allocations, which takes a tenth of the time of a stage that makes many small objects.
_COLLECT_AFTER = (10_000, 20, 50)


def import_beam() -> None:
    """Import Beam without collecting garbage, of which imports make little. Saves a tenth of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        importlib.import_module("apache_beam")
    finally:
        if was_enabled:
            gc.enable()
    gc.freeze()  # imported objects stay: later collections need not look at them


def collect_seldom() -> None:
    """Let a worker collect garbage seldom, and never look at what is imported so far."""
    gc.freeze()
    gc.set_threshold(*_COLLECT_AFTER)


def install(others: Mapping[str, Run]) -> None:
    """Change how some modules of Beam are run when they are imported: those named here, and ``others``.

    A module that is imported already stays as it is. Calling this again changes nothing.
    """
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        runs = dict.fromkeys((*_PARTS, *_LIBRARIES, *_REFUSED), _run_lean) | dict(others)
        sys.meta_path.insert(0, _Finder(runs))  # type: ignore[arg-type]  # importlib.abc would cost each start 3 ms


class _Finder:
    """Finds these modules where Python finds them, and runs them in another way."""

    def __init__(self, runs: Mapping[str, Run]) -> None:
        self._runs = runs

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        run = self._runs.get(fullname)
        if run is None:
            return None
        for finder in sys.meta_path:
            if finder is not self and (spec := finder.find_spec(fullname, path, target)) is not None:
                if spec.loader is not None:
                    spec.loader = cast(Any, _Loader(spec.loader, run))
                return spec
        return None


class _Loader:
    """Runs a module in another way, and leaves it to its own loader afterwards."""

    def __init__(self, inner: Any, run: Run) -> None:
        self._inner = inner
        self._run = run

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = module.__loader__ = self._inner
        self._run(module, self._inner.exec_module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class _Imports:
    """Python's ``__import__``, which gives stand-ins to the modules that are run here, and to nobody else."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._original: Any = None
        self._running: list[str] = []  # by any thread
        self.left_out: dict[str, list[str]] = {}  # by package: the parts whose names it has not got

    def run(self, module: ModuleType, execute: Callable[[ModuleType], None]) -> None:
        """Run a module's code."""
        name = module.__name__
        self.left_out[name] = []
        with self._lock:
            if builtins.__import__ != self._import:
                self._original, builtins.__import__ = builtins.__import__, self._import
            self._running.append(name)
        try:
            execute(module)
        finally:
            with self._lock:
                self._running.remove(name)
                if not self._running and builtins.__import__ == self._import:
                    builtins.__import__ = self._original

    def _import(
        self,
        name: str,
        globals: Mapping[str, Any] | None = None,
        locals: Mapping[str, Any] | None = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> Any:
        importer = globals.get("__name__", "") if globals else ""
        if importer in self._running and level == 0 and name not in sys.modules:
            if _REFUSED.get(importer) == name:
                raise ImportError(f"{name} is imported when it is used", name=name)
            part = _PARTS.get(importer, {}).get(name)
            if part is not None and part not in sys.modules:
                self.left_out[importer].append(name)
                return _Nothing(name)
            library = name.partition(".")[0]
            if name in _LIBRARIES.get(importer, ()) and library not in sys.modules and _is_installed(library):
                if importer == _TEXT:
                    return _Documented(name)
                return _Names(importer, name) if fromlist else _Library(importer, name)
        return self._original(name, globals, locals, fromlist, level)


_imports = _Imports()


def _run_lean(module: ModuleType, execute: Callable[[ModuleType], None]) -> None:
    _imports.run(module, execute)
    if module.__name__ == _INFERENCE:
        vars(module)["resource"] = resource  # Beam sets it to None together with the model manager
    if left_out := _imports.left_out.pop(module.__name__):
        package = _Package(module, left_out)
        vars(module).update(__getattr__=package.get, __dir__=package.dir)
        if module.__name__ == _TYPES:
            batch = sys.modules[f"{_TYPES}.batch"]
            vars(batch)["BATCH_CONVERTER_REGISTRY"] = _Converters(vars(batch)["BATCH_CONVERTER_REGISTRY"])
        if _BIGQUERY in left_out:
            transform = vars(sys.modules["apache_beam.transforms.ptransform"])["PTransform"]
            transform._known_urns = _Transforms(transform._known_urns)


def _is_installed(library: str) -> bool:
    from importlib.util import find_spec  # here, because only processes that import Beam need it

    return find_spec(library) is not None


class _Nothing(ModuleType):
    """A module without names, for ``from … import *``."""

    __all__ = ()


class _Names:
    """A library whose names are copied, as by ``from library import name``."""

    def __init__(self, importer: str, library: str) -> None:
        self._of = importer, library

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Later(*self._of, name)


class _Documented:
    """A library, or a name in it, whose documentation is that of its parameters."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.__doc__ = f"Parameters\n----------\nThose of ``{name}``, which describes them.\n"

    def __getattr__(self, name: str) -> Any:
        return _Documented(f"{self._name}.{name}")


class _Later:
    """A class or function of a library that is imported when it is called or tested for."""

    def __init__(self, importer: str, library: str, name: str) -> None:
        self._importer, self._library, self._name = importer, library, name

    def real(self, library: str) -> Any:
        """Return what this stands for, if it is of this library."""
        if self._library.partition(".")[0] != library.partition(".")[0]:
            return self
        return getattr(importlib.import_module(self._library), self._name)

    def _used(self) -> Any:
        _settle(self._importer, self._library)
        return self.real(self._library)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._used()(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._used(), name)

    def __instancecheck__(self, instance: Any) -> bool:
        return isinstance(instance, self._used())

    def __subclasscheck__(self, subclass: type) -> bool:
        return issubclass(subclass, self._used())


class _Library(ModuleType):
    """A library that is imported when an attribute of it is used."""

    def __init__(self, importer: str, library: str) -> None:
        super().__init__(library)
        self.__dict__["_importer"] = importer

    def real(self, library: str) -> Any:
        """Return what this stands for, if it is this library."""
        return importlib.import_module(library) if library == self.__name__ else self

    def __getattr__(self, name: str) -> Any:
        _settle(self.__dict__["_importer"], self.__name__)
        return getattr(self.real(self.__name__), name)


def _settle(importer: str, library: str) -> None:
    """Put what is real in place of all stand-ins for a library that a module has."""
    names = vars(sys.modules[importer])
    for name, value in list(names.items()):
        if isinstance(value, _Later | _Library):
            names[name] = value.real(library)


class _Package:
    """The names of a package that are in modules which are not imported yet."""

    def __init__(self, package: ModuleType, parts: Sequence[str]) -> None:
        self._package = package
        self._parts = parts
        self._homes: dict[str, str] | None = None

    def get(self, name: str) -> Any:
        """Return a name of the package. Python calls it if the package does not have it."""
        if name == "__all__":  # for `from package import *`, which then takes all names that are there
            for part in self._parts:
                self._copy(part)
        elif not name.startswith("__"):
            home = self._known_homes().get(name)
            if home is not None:
                self._copy(home)
        if name in vars(self._package):
            return vars(self._package)[name]
        raise AttributeError(f"module {self._package.__name__!r} has no attribute {name!r}")

    def dir(self) -> list[str]:
        """Return all names of the package."""
        return sorted({*vars(self._package), *self._known_homes()} - {"__getattr__", "__dir__"})

    def _known_homes(self) -> Mapping[str, str]:
        if self._homes is None:
            homes: dict[str, str] = {}
            for part in self._parts:
                homes[part.rpartition(".")[2]] = part
                homes |= dict.fromkeys(self._names(part), part)
            self._homes = homes
        return self._homes

    def _names(self, part: str) -> Sequence[str]:
        """Return the names that a part defines for others, from its source if that lists them."""
        base, _, name = part.rpartition(".")
        folder = vars(importlib.import_module(base))["__path__"][0]
        try:
            with open(f"{folder}/{name}.py", encoding="utf-8") as file:
                found = _ALL.search(file.read())
        except OSError:
            found = None
        if found is None:
            self._copy(part)
            return ()
        return _QUOTED.findall(found[1])

    def _copy(self, part: str) -> None:
        """Do what ``from part import *`` does."""
        try:
            module = importlib.import_module(part)
        except ImportError:
            if part in _MISSING_WITHOUT_CLOUD:
                return
            raise
        names = vars(self._package)
        for name in module.__all__:
            names.setdefault(name, getattr(module, name))


class _Converters(dict[str, Any]):
    """Beam's converters of batches: those for a library's types are there when the library is."""

    def items(self) -> Any:
        """Return all that the libraries imported so far may need."""
        for part, library in _PARTS[_TYPES].items():
            if sys.modules.get(library) is not None:
                importlib.import_module(part)
        return list(super().items())


class _Transforms(dict[str, Any]):
    """The transforms that Beam finds by their URNs: a module that is not imported yet may define one."""

    def __missing__(self, urn: str) -> Any:
        importlib.import_module(_BIGQUERY)
        if urn in self:
            return self[urn]
        raise KeyError(urn)
