"""The runner's side of Beam's Fn API: one server for all workers, on a unix socket or, on a cluster, by TLS."""
