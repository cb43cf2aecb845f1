"""The runner's side of Beam's Fn API: one unix-socket server for control, data, state and logging."""
