"""What a command imports before it does anything: not Beam, unless it needs it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from luminosity.cli import MODULES, import_commands

_CODE = """
import sys
from luminosity.cli import import_commands
import_commands(sys.argv[1])
print("apache_beam" in sys.modules)
"""


_HELP = """
import sys
from luminosity.cli.main import main
try:
    main()
except SystemExit as end:
    heavy = "apache_beam", "importlib.metadata", "numpy", "packaging", "pyarrow", "rich"
    print(end.code, [name for name in heavy if name in sys.modules], file=sys.stderr)
"""


@pytest.mark.parametrize("words", [(), *((name,) for name in MODULES), ("drift", "watch"), ("export", "dataflow")])
def test_help_imports_nothing_that_takes_long(words: tuple[str, ...]) -> None:
    command = [sys.executable, "-c", _HELP, *words, "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stderr == "0 []\n"
    assert done.stdout.startswith(" ".join(["usage: lum", *words[:1]]))


@pytest.mark.parametrize("command", ["runs", "show", "ui", "bench", "serve", "enrich"])
def test_commands_import_no_beam_for_their_help(command: str) -> None:
    done = subprocess.run([sys.executable, "-c", _CODE, command], capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.stderr) == ("False\n", "")


def test_a_word_that_is_no_command_imports_all_for_the_help() -> None:
    assert set(import_commands("runs")) == {"runs"}
    assert set(import_commands("drift")) == {"drift.command", "drift.watch"}
    assert {"run", "runs", "drift.watch", "image"} <= set(import_commands("--help"))
