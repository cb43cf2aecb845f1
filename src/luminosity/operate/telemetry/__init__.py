"""Traces and metrics of runs for a collector of OpenTelemetry."""
