"""The images of requests: stored images, their owners, and uploads."""
