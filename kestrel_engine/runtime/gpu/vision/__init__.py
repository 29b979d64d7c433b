"""Images on the device: making crops, the vision tower, and the stored image prefixes."""
