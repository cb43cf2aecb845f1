"""What a run is called: by the name of its job, or else by its script and the folder of the script."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

from luminosity._shared.notebook import notebook_path
from luminosity.events import RunStarted

__all__ = ["RunName", "script_name"]

_WITHOUT_FILE = ("", "-", "-c")  # the first word of sys.argv if the code comes from no file
_COMMAND = "lum enrich "  # the first word of sys.argv if the command runs, followed by what it writes


@dataclass(frozen=True)
class RunName:
    """The names of a run. Runs with the same job, or without one in the same folder with the same name, are alike."""

    name: str  # of the script or the notebook, or a command such as "lum enrich out.parquet"
    folder: str  # of the script, absolute, or an address such as s3://bucket
    job: str = ""  # --job_name, if it was given

    @classmethod
    def of(cls, job: str = "") -> RunName:
        """Return the names of a run that this process starts.

        A script's folder is known even if the script has changed the working folder. ``python -m package`` has the name
        of the package. Code of no file, such as ``python -c``, is named ``python`` and has the working folder.
        """
        script = sys.argv[0] if sys.argv else ""
        if script.startswith(_COMMAND):
            folder, _, written = script.removeprefix(_COMMAND).rstrip("/").rpartition("/")
            return cls(f"{_COMMAND}{written}", folder, job)
        try:
            path = _path_of(script)
        except OSError:  # the working folder was removed
            return cls("python" if script in _WITHOUT_FILE else os.path.basename(script), "", job)
        return cls(os.path.basename(path), os.path.dirname(path), job)

    def is_of(self, run: RunStarted) -> bool:
        """Return whether a recorded run is of the same pipeline. Older versions recorded only the script's name."""
        if not run.job and not run.folder:
            return run.name == self.name
        return run.pipeline == ((self.job, "") if self.job else (self.name, self.folder))

    @staticmethod
    def of_enrich(written: str) -> str:
        """Return the first word of ``sys.argv`` with which `lum enrich` gives its run a name: what it writes.

        >>> RunName.of_enrich("s3://shop/reviews.parquet")
        'lum enrich s3://shop/reviews.parquet'
        """
        return f"{_COMMAND}{written if '://' in written else os.path.abspath(written)}"


def script_name() -> str:
    """Return the name of the script, or of the notebook, that runs a pipeline."""
    return RunName.of().name


def _path_of(script: str) -> str:
    """Return the absolute path of a script or notebook, given the first word of ``sys.argv``."""
    if notebook := notebook_path():
        return os.path.abspath(notebook)
    if script in _WITHOUT_FILE:
        return os.path.abspath("python")
    if os.path.basename(script) == "__main__.py":
        return os.path.dirname(os.path.abspath(script))
    if os.path.isabs(script):
        return os.path.normpath(script)
    name = os.path.basename(script)
    main = getattr(sys.modules.get("__main__"), "__file__", None) or ""
    if os.path.isabs(main) and os.path.basename(main) == name:
        return main
    path = os.path.abspath(script)
    if os.path.isfile(path):
        return path
    # The script has changed the working folder; its own folder is on the path of imports.
    there = (os.path.join(folder, name) for folder in sys.path if os.path.isabs(folder))
    return next((each for each in there if os.path.isfile(each)), path)
