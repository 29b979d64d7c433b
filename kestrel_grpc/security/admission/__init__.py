"""What a caller may take: the order of questions before a message is read, and the room for it."""
