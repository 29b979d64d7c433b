"""Charts by plotting libraries, with the table that each shows as truth."""
