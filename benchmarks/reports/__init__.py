"""What a benchmark reports: figures beside bars and machine, as tables and JSON."""
