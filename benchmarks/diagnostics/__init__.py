"""Programs that divide the time of one request and the gaps between tokens, check a table, or format figures."""
