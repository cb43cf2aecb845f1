"""Tables into vector stores, and neighbours out of them."""
