"""``lum metrics``: metrics of runs for Prometheus, a dashboard and alert rules."""
