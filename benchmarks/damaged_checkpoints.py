"""Damages checkpoint folders at random, and counts what a start and ``lum checkpoint --restore last`` make of them.

Half of the folders are those of killed runs, with a log that is not written back. Each is damaged in one way: bits,
zeros, a part that is missing or comes from another place, a file that is removed or swapped with another. A start must
refuse the folder, or get everything that was written; a refused one must go back to its kept state.

    python benchmarks/damaged_checkpoints.py [DAMAGES]
"""

from __future__ import annotations

import random
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path

import _measure

from luminosity.engine.durable.store import CheckpointFolder
from luminosity.engine.durable.upkeep.kept_states import KeptStates, restore_last
from luminosity.errors import CheckpointDamaged, LuminosityError

sys.path.append(str(Path(__file__).resolve().parent.parent))
from tests.durability import damages

_DAMAGES = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000


def main() -> None:
    outcomes: dict[str, Counter[str]] = {}
    wrong: list[str] = []
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        for is_killed in (True, False):
            chance = random.Random(int(is_killed))
            good = root / f"good-{is_killed}"
            damages.make(good, chance, is_killed=is_killed)
            expected = damages.everything_in(shutil.copytree(good, root / "read"))
            kept = _kept(shutil.copytree(good, root / "with kept"), good)
            for number in range(_DAMAGES // 2):
                copy = shutil.copytree(good, root / "damaged")
                kind, how = damages.damage(copy, chance)
                outcome = _outcome(copy, expected, kept)
                outcomes.setdefault(how, Counter())[outcome] += 1
                if outcome not in ("refused, restored", "as written"):
                    wrong.append(f"{kind}, {how}, killed: {is_killed}, damage {number}: {outcome}")
                shutil.rmtree(copy)
            shutil.rmtree(root / "read")
            shutil.rmtree(root / "with kept")
    names = sorted({outcome for found in outcomes.values() for outcome in found})
    _measure.print_table({how: {name: float(found[name]) for name in names} for how, found in sorted(outcomes.items())})
    total = sum(outcomes.values(), Counter[str]())
    for name in names:
        print(f"{name}: {total[name]} of {total.total()}")
    print(*wrong, sep="\n")
    _measure.print_figure("damages that were neither refused nor harmless", len(wrong), at_most=0)


def _kept(folder: Path, good: Path) -> object:
    """Keep the state of a folder in the one that is damaged; return what is in it."""
    opened = CheckpointFolder(str(folder), kept=KeptStates(str(folder), 1, every_s=0.0))
    opened.keep_state()
    opened.close()
    # Copies: a link would share the damage of the folder's own file.
    shutil.copytree(folder / "kept", good / "kept")
    return damages.everything_in(folder)


def _outcome(copy: Path, expected: object, kept: object) -> str:
    try:
        return "as written" if damages.everything_in(copy) == expected else "WRONG RESULT"
    except CheckpointDamaged:
        pass
    except LuminosityError as error:
        return f"another error: {type(error).__name__}"
    except Exception as error:  # what this benchmark is after
        return f"RAW ERROR: {type(error).__name__}"
    try:
        restore_last(str(copy))
        found = damages.everything_in(copy)
    except LuminosityError as error:
        return f"not restored: {error}"
    return "refused, restored" if _without_notes(found) == _without_notes(kept) else "WRONG STATE"


def _without_notes(found: object) -> object:
    """Leave out what a restore notes."""
    assert isinstance(found, tuple)
    return found[1:]


if __name__ == "__main__":
    main()
