"""Runs for Prometheus: metrics, a dashboard and alert rules."""
