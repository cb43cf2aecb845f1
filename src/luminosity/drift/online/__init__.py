"""Detects drift while rows arrive, with a false-alarm rate that you choose."""
