"""The copy of a checkpoint in another place, from which another machine can continue the run."""
