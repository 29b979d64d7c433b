"""What counts as an image, and its way into a message."""
