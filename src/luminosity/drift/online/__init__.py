"""Drift found while rows arrive, with false alarms as rare as asked for."""
