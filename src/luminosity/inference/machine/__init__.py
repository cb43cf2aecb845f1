"""One model host for all worker processes of a run: how they find it, start it, and talk with it.

A worker calls :func:`~luminosity.inference.machine.client.connect` and gets a channel; in the host, a function of one
argument runs for each such channel, in a thread of its own. Nothing here knows about models.
"""
