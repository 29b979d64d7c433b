"""The names under which users of the vendor's engine know the model's configuration and LoRA."""
