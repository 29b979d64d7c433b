"""Charts drawn by plotting libraries in Chromium, with the table that each shows as truth."""
