"""The two clients, and what they share: arguments to messages, streams, many images at once."""
