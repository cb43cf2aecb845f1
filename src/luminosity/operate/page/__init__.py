"""``lum ui``: the page of runs, live and past.

The page shows what records of runs have. A number of a run is described in ``luminosity.events.views``, and
``luminosity.engine.reporting`` fills it in; the page's columns follow.
"""
