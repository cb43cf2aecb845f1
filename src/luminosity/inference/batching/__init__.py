"""Which examples go into one batch, and when: pure decisions, with the time given from outside."""
