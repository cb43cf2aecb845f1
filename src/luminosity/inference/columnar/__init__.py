"""Quick models over whole columns: one array in and one out, nothing done row by row."""
