"""A test's result as one page of HTML: nothing is fetched, nothing runs."""
