"""The page of a team: who may read it from other machines, and who may act."""
