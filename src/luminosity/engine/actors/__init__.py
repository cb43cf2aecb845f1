"""Workers of a Ray cluster: the actors, their launcher, and their blocks as objects of the cluster's stores."""
