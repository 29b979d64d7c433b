"""Programs that find the cause of a difference, profile one layer, check a table, or format figures."""
