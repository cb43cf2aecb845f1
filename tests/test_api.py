"""What users import is what is there."""

from __future__ import annotations

import luminosity
from luminosity import errors


def test_every_public_name_is_there() -> None:
    for name in luminosity.__all__:
        assert getattr(luminosity, name).__module__.startswith("luminosity.")


def test_the_drawn_tree_holds_every_error() -> None:
    drawn = errors.__doc__ or ""
    for name in set(errors.__all__) - {"Fix"}:
        assert issubclass(getattr(errors, name), errors.LuminosityError)
        assert f" {name} " in f"{drawn} ".replace("\n", " "), f"{name} is missing in the tree"
