"""Images on the device: their crops, the vision tower, and the image prefixes that are kept."""
