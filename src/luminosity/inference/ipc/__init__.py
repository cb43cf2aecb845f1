"""Transport between a run's worker processes and the process that serves them all; nothing here knows about models.

A worker calls :func:`~luminosity.inference.ipc.client.connect`, which finds or starts the serving process, and gets a
channel. In the serving process, called the host, a function runs for each channel, in its own thread.
"""
