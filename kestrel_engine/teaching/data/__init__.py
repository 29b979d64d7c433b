"""What is taught: labelled images, how they are read, and the tokens and targets made of them. Imports no torch."""
