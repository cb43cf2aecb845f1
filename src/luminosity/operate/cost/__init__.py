"""What a run costs: price sheets and bills."""
