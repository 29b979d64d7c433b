"""Printed text: renderer, questions and truth."""
