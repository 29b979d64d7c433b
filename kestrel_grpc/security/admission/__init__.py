"""The checks of a call before its message is read, and the limits on messages in memory."""
