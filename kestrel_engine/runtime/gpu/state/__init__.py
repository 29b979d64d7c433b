"""What the device keeps between steps for each sequence, and the copies between host and device."""
