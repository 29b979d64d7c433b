"""The settings of an engine, and what a setting is."""
