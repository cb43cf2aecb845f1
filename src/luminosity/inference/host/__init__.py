"""The model host: owns the models of one device in one process and runs their batches.

:mod:`~luminosity.inference.host.device` describes how the parts work together.
"""
