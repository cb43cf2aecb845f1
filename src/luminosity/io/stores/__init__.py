"""Write tables to vector stores, and search them for neighbours."""
