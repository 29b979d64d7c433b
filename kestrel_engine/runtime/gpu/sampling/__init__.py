"""From hidden states to sampled tokens: the rules of each row, and the head that obeys them."""
