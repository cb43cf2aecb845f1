"""Adapters that give any Beam ``ModelHandler`` the hooks of a ``Handler``."""
