"""What the server knows about its calls and its load: access log, statistics, load reports, captures, profiles."""
