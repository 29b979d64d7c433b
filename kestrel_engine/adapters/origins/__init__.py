"""Where adapters come from: a folder, the hub, the tuning API."""
