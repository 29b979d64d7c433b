"""The step thread: its loop, and the delivery of what a step gave to the event loop."""
