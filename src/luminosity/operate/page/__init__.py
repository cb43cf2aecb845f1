"""``lum ui``: the page of runs, live and past."""
