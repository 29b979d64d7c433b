"""Text that a skill writes: its rules, its penalties, its stop strings, and ids to characters."""
