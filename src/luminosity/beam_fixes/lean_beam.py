"""Faster imports of Beam: without garbage collection, and without libraries that most pipelines do not use.

``import apache_beam`` imports pandas, pyarrow and pymongo, which is half of its time and of its memory, and requests,
httplib2, beartype and more, which are a fifth of the rest. Here these imports wait until something uses them:

* ``apache_beam.io`` and ``apache_beam.typehints`` copy all names of some modules into themselves. They get those of
  :data:`_PARTS` when one is asked for.
* ``apache_beam.io.textio`` uses pandas at its top, but only to copy from its documentation.
* ``apache_beam.ml.inference.base`` imports torch if it can, only to manage models.
* ``apache_beam.ml.inference.sklearn_inference`` imports scikit-learn and pandas, which take 85 MB and a second, to name
  types. Its functions use them in workers. A few other modules use a library in some functions only.

Each of these modules runs with an ``__import__`` of its own. Nobody else ever sees it, or a stand-in. What a program
has imported already, and what is not installed, is imported as ever.
"""

from __future__ import annotations

import builtins
import gc
import importlib
import re
import resource
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, ForwardRef, cast

__all__ = ["collect_seldom", "import_beam", "install"]

Run = Callable[[ModuleType, Callable[[ModuleType], None]], None]  # gets a module, and what runs its code

_IO, _TYPES, _TEXT = "apache_beam.io", "apache_beam.typehints", "apache_beam.io.textio"
_INFERENCE = "apache_beam.ml.inference.base"
_SKLEARN = "apache_beam.ml.inference.sklearn_inference"
# Modules whose names a package copies, with the libraries that make them slow to import.
_PARTS: Mapping[str, Mapping[str, str]] = {
    _IO: {f"{_IO}.mongodbio": "pymongo", f"{_IO}.parquetio": "pyarrow"},
    _TYPES: {f"{_TYPES}.pandas_type_compatibility": "pandas", f"{_TYPES}.arrow_type_compatibility": "pyarrow"},
}
_LIBRARIES: Mapping[str, Sequence[str]] = {_TEXT: ("pandas",), _TYPES: ("pandas", "pyarrow")}
# Beam imports it, and with it torch, only if it can; and again when it is used. Torch takes 2 s and 200 MB.
_REFUSED = {_INFERENCE: "apache_beam.ml.inference.model_manager"}
# Modules that a module uses in functions, or names in types.
_LATE: Mapping[str, Sequence[str]] = {
    _SKLEARN: ("joblib", "pandas", "sklearn.base"),
    "apache_beam.internal.http_client": ("httplib2",),
    "apache_beam.io.gcp.bigquery_tools": ("regex",),
    "apache_beam.io.gcp.gce_metadata_util": ("requests",),
}
# Modules that a module takes from a package, and of which only its functions use something.
_TAKEN: Mapping[str, tuple[str, str]] = {"apache_beam.io.gcp.pubsub": ("google.cloud", "pubsub")}
# Modules of which a module takes names that its functions call.
_CALLED: Mapping[str, Sequence[str]] = {
    "apache_beam.transforms.util": ("cryptography.fernet",),
    "apache_beam.typehints.typehints": ("beartype.door", "beartype.roar"),
}
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
        runs = dict.fromkeys((*_PARTS, *_LIBRARIES, *_REFUSED, *_LATE, *_TAKEN, *_CALLED), _run_lean) | dict(others)
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


def _run_lean(module: ModuleType, execute: Callable[[ModuleType], None]) -> None:
    name, names = module.__name__, vars(module)
    imports = _Imports(name)
    names["__builtins__"] = {**vars(builtins), "__import__": imports.find}
    try:
        execute(module)
    finally:
        imports.is_running = False
        names["__builtins__"] = vars(builtins)  # its functions keep the others, which now differ in nothing
    if name == _INFERENCE:
        names["resource"] = resource  # Beam sets it to None together with the model manager
    if name in _LATE:
        _import_late(module, imports)
    if name in _CALLED:
        _import_when_called(module)
    if isinstance(names.get("pandas"), _Documented):
        del names["pandas"]
        names["__getattr__"] = _pandas_of_text
    if imports.left_out:
        package = _Package(module, imports.left_out)
        names.update(__getattr__=package.get, __dir__=package.dir)
        if name == _TYPES:
            batch = vars(sys.modules[f"{_TYPES}.batch"])
            batch["BATCH_CONVERTER_REGISTRY"] = _Converters(batch["BATCH_CONVERTER_REGISTRY"])


class _Imports:
    """The imports of one module while it runs for the first time; later, its functions import as all others do."""

    def __init__(self, importer: str) -> None:
        self._importer = importer
        self.is_running = True
        self.left_out: list[str] = []  # parts whose names the module has not got

    def find(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Do what ``__import__`` does, or return a stand-in."""
        if self.is_running and (name not in sys.modules or self._importer in _TAKEN):
            if _REFUSED.get(self._importer) == name:
                raise ImportError(f"{name} is imported when it is used", name=name)
            if name == _TAKEN.get(self._importer, ("",))[0] and _is_installed(".".join(_TAKEN[self._importer])):
                return _Taken(name, _TAKEN[self._importer][1], self)
            library = _PARTS.get(self._importer, {}).get(name)
            if library is not None and library not in sys.modules:
                self.left_out.append(name)
                return _Nothing(name)
            if name in _LIBRARIES.get(self._importer, ()) and _is_installed(name):
                return _Documented(name) if self._importer == _TEXT else _Nothing(name)
            if name in (*_LATE.get(self._importer, ()), *_CALLED.get(self._importer, ())) and _is_installed(
                name.partition(".")[0]
            ):
                return _Late(name, self)
        return builtins.__import__(name, *args, **kwargs)


def _is_installed(library: str) -> bool:
    from importlib.util import find_spec  # here, because only processes that import Beam need it

    try:
        return find_spec(library) is not None
    except ModuleNotFoundError:  # not even its package is there
        return False


class _Nothing(ModuleType):
    """A module without names, for ``from … import *``, and for an import that asks whether a library is there."""

    __all__ = ()


class _Documented:
    """pandas, or a name in it, whose documentation names it instead of describing its parameters."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.__doc__ = f"Parameters\n----------\nThose of ``{name}``, which describes them.\n"

    def __getattr__(self, name: str) -> Any:
        return _Documented(f"{self._name}.{name}")


class _Late(ModuleType):
    """A module that is imported when something of it is used. Until then, what others take of it are names."""

    def __init__(self, name: str, imports: _Imports) -> None:
        super().__init__(name)
        self._imports = imports

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if self._imports.is_running:
            return ForwardRef(f"{self.__name__}.{name}")
        return getattr(importlib.import_module(self.__name__), name)


class _Taken(ModuleType):
    """A package of which a module takes a module that is imported when something of that is used."""

    def __init__(self, name: str, taken: str, imports: _Imports) -> None:
        super().__init__(name)
        setattr(self, taken, _Late(f"{name}.{taken}", imports))


def _import_late(module: ModuleType, imports: _Imports) -> None:
    """Let a module that has run get the types that it has imported by name, when something asks it for them."""
    names = vars(module)
    types = {name: value.__forward_arg__ for name, value in names.items() if isinstance(value, ForwardRef)}
    for name, path in types.items():
        del names[name]
        package = path.partition(".")[0]
        names.setdefault(package, _Late(package, imports))  # typing.get_type_hints looks for it here

    def get(name: str) -> Any:
        if name not in types:
            raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")
        home, _, attribute = types[name].rpartition(".")
        return getattr(importlib.import_module(home), attribute)

    names["__getattr__"] = get


def _import_when_called(module: ModuleType) -> None:
    """Let a module that has run get all names that it lacks as soon as it calls one of them."""
    names = vars(module)
    paths = {name: value.__forward_arg__ for name, value in names.items() if isinstance(value, ForwardRef)}

    def call(called: str, *args: Any, **kwargs: Any) -> Any:
        for name, path in paths.items():
            home, _, attribute = path.rpartition(".")
            names[name] = getattr(importlib.import_module(home), attribute)
        return names[called](*args, **kwargs)

    names.update({name: partial(call, name) for name in paths})


def _pandas_of_text(name: str) -> Any:
    if name != "pandas":
        raise AttributeError(f"module {_TEXT!r} has no attribute {name!r}")
    return importlib.import_module(name)


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
        module = importlib.import_module(part)
        names = vars(self._package)
        for name in module.__all__:
            names.setdefault(name, getattr(module, name))


class _Converters(dict[str, Any]):
    """Beam's converters of batches: those for a library's types are there as soon as the library is."""

    def _complete(self) -> _Converters:
        for part, library in _PARTS[_TYPES].items():
            if sys.modules.get(library) is not None:
                importlib.import_module(part)
        return self

    def __contains__(self, name: object) -> bool:
        return dict.__contains__(self._complete(), name)

    def __getitem__(self, name: str) -> Any:
        return dict.__getitem__(self._complete(), name)

    def __iter__(self) -> Iterator[str]:
        return dict.__iter__(self._complete())

    def __len__(self) -> int:
        return dict.__len__(self._complete())

    def items(self) -> Any:
        """Return all that the libraries imported so far may need."""
        return dict.items(self._complete())

    def keys(self) -> Any:
        """Return their names."""
        return dict.keys(self._complete())

    def values(self) -> Any:
        """Return what makes them."""
        return dict.values(self._complete())
