"""What a device does and can do: rates, traces, the work that a model needs."""
