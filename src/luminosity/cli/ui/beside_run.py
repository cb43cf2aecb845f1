"""``lum run --ui``: the page beside a run, and what happens to it when the run has ended."""

from __future__ import annotations

import argparse
import atexit
import sys
from collections.abc import Sequence

from luminosity.cli.common.options import chosen_folder
from luminosity.operate.page.beside import PageBeside

__all__ = ["open_beside"]


def open_beside(options: Sequence[str]) -> PageBeside:
    """Start the page of the run with these options, print its address, and end it with this process.

    With a terminal, the page stays when the run has ended, until Ctrl-C: its reader wants to see how it ended. Raises
    :class:`luminosity.errors.LuminosityError` if it can't be started.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--run_dir")
    page = PageBeside(chosen_folder(parser.parse_known_args(options)[0]))
    has_terminal = sys.stdin.isatty() and sys.stderr.isatty()
    if has_terminal or page.token_file is None:
        print(f"The page of this run is at {page.address}", file=sys.stderr, flush=True)
    else:  # the output may be a log that others read
        address = page.address.partition("?")[0]
        print(f"The page of this run is at {address}?token=TOKEN, with the token in {page.token_file}", file=sys.stderr)
    # Functions of atexit run after the script's traceback was printed, and before this one those of the run's parts.
    atexit.register(_end, page, has_terminal)
    return page


def _end(page: PageBeside, stays: bool) -> None:
    try:
        if stays and page.is_wanted:
            print(f"The page stays at {page.address} until Ctrl-C.", file=sys.stderr, flush=True)
            page.wait()
    except KeyboardInterrupt:
        print(file=sys.stderr)  # the line with ^C ends
    finally:
        page.end()
