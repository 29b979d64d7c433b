"""From a configuration to the parts of an engine. The only place that picks device, dtype, runtime and pool size."""
