"""Sampling on the device: encoding the rules of each row, and the head that samples by them."""
