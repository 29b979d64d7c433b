"""The per-sequence state that the device keeps between steps, and copies between host and device."""
