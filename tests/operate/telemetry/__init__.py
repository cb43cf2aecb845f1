"""Tests of traces and metrics for a collector of OpenTelemetry."""
