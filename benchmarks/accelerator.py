"""What one accelerator does: text into vectors; with --drift, a million rows compared with a million."""

from __future__ import annotations

import sys


def main() -> None:
    if "--drift" in sys.argv:
        import _accelerator_drift

        _accelerator_drift.main()
    else:
        import _accelerator_text

        _accelerator_text.main()


if __name__ == "__main__":
    main()
