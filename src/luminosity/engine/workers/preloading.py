"""Choose the modules that the fork server imports before it forks workers, so that they share its memory."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping, Sequence

from luminosity.core import OPENMP_VARIABLES

__all__ = ["modules_to_preload", "modules_with_openmp"]

_STEP_MODULES = ("luminosity.inference.", "luminosity.io.", "luminosity.tables.")
_TEXT = "luminosity.inference.handlers.text."
_WITH_TORCH = (  # import torch at their top
    *(f"{_TEXT}packed.{name}" for name in ("choice", "encoder", "int8", "kernels")),
    *(f"{_TEXT}slots.{name}" for name in ("choosing", "decoder", "device_slots", "model")),
)
_INFERENCE = "apache_beam.ml.inference.base"  # workers change it before they unpickle steps
_SKLEARN = "apache_beam.ml.inference.sklearn_inference"  # uses scikit-learn, which imports pandas
_LIBRARY_BASE = "sklearn.base"
_OF_LIBRARY = re.compile(r"sklearn\.[a-z]\w*")
# Variables that OpenMP, scikit-learn, scipy and joblib read when they are imported.
_READ_ON_IMPORT = ("OMP_", "GOMP_", "KMP_", "OPENBLAS_", "SKLEARN_", "SCIPY_", "JOBLIB_", "LOKY_")
_USUAL = {*OPENMP_VARIABLES, "KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK"}  # scikit-learn sets the last two itself


def modules_to_preload() -> list[str]:
    """Return the modules that the workers of this process's pipelines will import: those that building them imported.

    Only Luminosity's own modules for steps count, Beam's RunInference, and pandas if anything but Beam has it, or a
    pipeline may use Beam's handlers for scikit-learn. They import no accelerator library, start no threads and set no
    number of threads, so that the fork server may import them, and workers share their memory. What else a script has
    imported may do all of that.
    """
    names = list(sys.modules)
    found = [name for name in names if name.startswith(_STEP_MODULES) and name not in _WITH_TORCH]
    found += [_INFERENCE] if _INFERENCE in sys.modules else []
    return [*found, "pandas"] if _SKLEARN in sys.modules or _has_pandas(names) else found


def modules_with_openmp(environments: Iterable[Mapping[str, str]]) -> list[str] | None:
    """Return further modules, which load OpenMP; None if a worker may need another number of threads than one.

    These are scikit-learn, if the script has imported Beam's handlers for it, and what the script uses of it.
    ``environments`` are those of the workers. OpenMP reads its number of threads when it is loaded, and starts threads
    only when it computes. With one thread, BLAS starts none either.
    """
    if not all(map(_has_one_thread, environments)):
        return None
    if _SKLEARN not in sys.modules:
        return []
    return [_LIBRARY_BASE, _SKLEARN, *filter(_OF_LIBRARY.fullmatch, list(sys.modules))]


def _has_one_thread(environment: Mapping[str, str]) -> bool:
    """Return whether OpenMP gets one thread in an environment, and nothing else that is special.

    >>> _has_one_thread(dict.fromkeys(OPENMP_VARIABLES, "1"))
    True
    >>> _has_one_thread(dict.fromkeys(OPENMP_VARIABLES, "1") | {"OMP_NUM_THREADS": "2"})
    False
    >>> _has_one_thread(dict.fromkeys(OPENMP_VARIABLES, "1") | {"OMP_PROC_BIND": "true"})
    False
    """
    special = (name for name in environment if name.startswith(_READ_ON_IMPORT) and name not in _USUAL)
    return all(environment.get(name) == "1" for name in OPENMP_VARIABLES) and not any(special)


def _has_pandas(names: Sequence[str]) -> bool:
    """Return whether a module has imported pandas, under its usual name. Beam does so itself in some processes."""
    pandas = sys.modules.get("pandas")
    users = (vars(sys.modules[name]) for name in names if not name.startswith(("apache_beam.", "pandas")))
    return pandas is not None and any(each.get("pd") is pandas or each.get("pandas") is pandas for each in users)
