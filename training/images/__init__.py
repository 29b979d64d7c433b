"""From drawn scenes to the crops that the model sees."""
