"""From sums over pairs of bins to the result of a permutation test."""
