"""The model in training: batches, losses, optimiser, checkpoints, validation."""
